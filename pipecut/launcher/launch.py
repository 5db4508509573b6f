"""launch(): a function on several ranks of this machine, without torchrun."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from ..errors import InputError, LaunchError
from .rank import Call, Meeting, environment_of, is_starting, process_group, run_rank
from .watch import Watch, stop

# MERGED: Starts the process of a rank: a new one, or a fork of this one where a new one could not find the function.


class _Starter:
    """Knows how the ranks of one launch are started.

    A new process imports the function by its name, which the functions of a notebook and of a prompt, lambdas and
    inner functions do not have. A fork has them. But it does not work with a device that was used before, and has to
    do with one thread.
    """

    def __init__(self, call: Call, meeting: Meeting, env: Mapping[str, str] | None) -> None:
        self.call = call
        self.meeting = meeting
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.env = {**threads, **(env or {})}
        self.forks = self._why_not_new() is not None and self._may_fork()

    def process(self, rank: int) -> BaseProcess:
        """The process of a rank, before its start."""
        context: Any = multiprocessing.get_context("fork" if self.forks else "spawn")
        args = (rank, self.meeting, self.call if self.forks else None)
        process: BaseProcess = context.Process(target=run_rank, args=args, name=f"rank {rank}")
        return process

    def start(self, rank: int, process: BaseProcess) -> None:
        """Start it in its environment, which what it imports may read at once."""
        with patch.dict(os.environ, {**self.env, **environment_of(rank, self.meeting.ranks)}):
            process.start()

    def _why_not_new(self) -> str | None:
        """Why a new process would not find the call; it is left for the ranks if it would."""
        try:
            self.meeting.leave_call(self.call)
        except Exception as error:
            return f"it, or one of its arguments, cannot be sent to a new process ({error})"
        if self.meeting.call_mentions("__main__") and not _has_file(sys.modules["__main__"]):
            return "a new process cannot import what was defined in a notebook or at a prompt"
        return None

    def _may_fork(self) -> bool:
        obstacle = None
        if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
            obstacle = "this system does not allow it"
        elif _used_accelerator():
            obstacle = f"{_used_accelerator()} is in use here already"
        if obstacle is None:
            return True
        name = _name_of(self.call[0])
        raise LaunchError(
            f"launch() cannot start {name}: {self._why_not_new()}; and this process cannot be forked, for {obstacle}. "
            f"Put {name} at the top level of a module, and import it from there"
        )


def _name_of(function: object) -> str:
    """A function's name for messages; a partial is called by what it wraps."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else _name_of(getattr(function, "func", type(function)))


def _has_file(main: Any) -> bool:
    """Whether the main module is a script or a module, which ranks can import."""
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def _used_accelerator() -> str | None:
    """The kind of device that this process has begun to use."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or not torch.get_device_module(device).is_initialized():
        return None
    return device.type


_T = TypeVar("_T")


def launch(
    fn: Callable[..., _T],
    ranks: int = 4,
    *args: Any,
    backend: str = "gloo",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[_T]:
    """Call `fn(*args)` in so many local processes at once, and return what the ranks return, in their order.

    torch.distributed is initialised when `fn` is called, with `backend`; `dist.get_rank()` tells the ranks apart. The
    environment has RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, as under torchrun, and `env`. Each rank has one
    thread, unless OMP_NUM_THREADS is set. A backend of devices, such as "nccl", gets one device for each rank.

    Arguments and results are copied; tensors arrive on the CPU. The first failure of a rank is raised here, as a
    LaunchError with that rank and its traceback, and ends all others. So does the `timeout`, in seconds for all of
    the call, with the place where every rank was. No process is left in any case.

    A script calls this below `if __name__ == "__main__":`, for new processes import it. Functions that they cannot
    import (of a notebook or a prompt, lambdas, inner functions) run in forks of this process, with one thread. That
    does not work once this process has used a GPU: then put the function in a module.

    Under torchrun, and on a rank, there are processes already: `fn` is called in this one, after initialising
    torch.distributed if need be, and the result is a list of one. Their number must be `ranks`; `timeout` is not used.

    >>> def shifted(start: int) -> int:
    ...     return start + dist.get_rank()
    >>> launch(shifted, 2, 10)
    [10, 11]
    """
    _check(fn, ranks, timeout)
    if is_starting():
        raise LaunchError(
            "launch() was called while a rank was importing the script that it is in, and would start ranks without "
            f'end: call it below `if __name__ == "__main__":`, so that it runs once; {_name_of(fn)} stays above'
        )
    if _is_rank():
        return [_call_here(fn, ranks, args, backend, env)]
    with tempfile.TemporaryDirectory(prefix="pipecut-", ignore_cleanup_errors=True) as directory:
        meeting = Meeting(directory, ranks, backend)
        starter = _Starter((fn, args), meeting, env)
        processes = [starter.process(rank) for rank in range(ranks)]
        try:
            for rank, process in enumerate(processes):
                starter.start(rank, process)
            return Watch(processes, meeting, _name_of(fn), timeout).results()
        finally:
            stop(processes)


def _check(fn: object, ranks: object, timeout: object) -> None:
    if not callable(fn):
        raise InputError(f"launch() takes a function, got {type(fn).__name__}: write launch(train, 4), not train()")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InputError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise InputError(f"timeout must be a number of seconds above 0, or None, got {timeout!r}")


def _is_rank() -> bool:
    return dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def _call_here(
    fn: Callable[..., _T], ranks: int, args: tuple[Any, ...], backend: str, env: Mapping[str, str] | None
) -> _T:
    there_are = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if there_are != ranks:
        raise InputError(
            f"launch() was asked for {ranks} ranks, and this process is one of {there_are} already (WORLD_SIZE): pass "
            f"ranks={there_are}, or start {ranks} with torchrun --nproc-per-node={ranks}; without torchrun, unset RANK "
            "and WORLD_SIZE"
        )
    os.environ.update(env or {})
    if dist.is_initialized():
        return fn(*args)
    with process_group(backend, int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))):
        return fn(*args)
