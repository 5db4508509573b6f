"""launch(): call a function once on several ranks of this machine, without torchrun."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import InputError, LaunchError
from .pool import RankPool, name_of
from .rank import GROUP_TIMEOUT, is_starting, process_group

_T = TypeVar("_T")


def launch(
    fn: Callable[..., _T],
    ranks: int = 4,
    *args: Any,
    backend: str = "gloo",
    timeout: float | None = None,
    group_timeout: float = GROUP_TIMEOUT,
    env: Mapping[str, str] | None = None,
) -> list[_T]:
    """Call `fn(*args)` on `ranks` local processes at once, and return the values that they return, in rank order.

    torch.distributed is initialised when `fn` is called, with `backend`; `dist.get_rank()` tells the ranks apart. The
    environment has RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, as under torchrun, and `env`. Each rank has one
    thread, unless OMP_NUM_THREADS is set. A backend of devices, such as "nccl", gets one device per rank.

    Arguments and results are copied; tensors arrive on the CPU. The first failure of a rank is raised here, as a
    LaunchError with that rank and its traceback, and ends all others. So does the `timeout`, in seconds for the
    whole call, with the stack of every rank. No process is left in any case. `group_timeout` is that of the process
    group, in seconds: a rank waits no longer for another, in a collective or in a step.

    A script calls this below `if __name__ == "__main__":`, for new processes import it. Functions that they cannot
    import (of a notebook or a prompt, lambdas, inner functions) run in forks of this process, with one thread. That
    does not work once this process has used a GPU: then put the function in a module.

    Under torchrun, and on a rank, there are processes already: `fn` is called in this one, after initialising
    torch.distributed if needed, and the result is a list of one. Their number must be `ranks`; `timeout` is not used.

    >>> def shifted(start: int) -> int:
    ...     return start + dist.get_rank()
    >>> launch(shifted, 2, 10)
    [10, 11]
    """
    _check(fn, ranks, timeout, group_timeout)
    if is_starting():
        raise LaunchError(
            "launch() was called while a rank was importing the script that it is in, and would start ranks without "
            f'end: call it below `if __name__ == "__main__":`, so that it runs once; {name_of(fn)} stays above'
        )
    if _is_rank():
        return [_call_here(fn, ranks, args, backend, group_timeout, env)]
    with RankPool(ranks, backend=backend, env=env, group_timeout=group_timeout) as pool:
        results = pool.run(fn, *args, timeout=timeout)
        pool.close(timeout)  # wait for functions that were registered to run at exit, too
        return results


def _check(fn: object, ranks: object, timeout: object, group_timeout: object) -> None:
    if not callable(fn):
        raise InputError(f"launch() takes a function, got {type(fn).__name__}: write launch(train, 4), not train()")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InputError(f"ranks must be an integer of at least 1, got {ranks!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise InputError(f"timeout must be a number of seconds above 0, or None, got {timeout!r}")
    if not (isinstance(group_timeout, int | float) and 0 < group_timeout < math.inf):
        raise InputError(f"group_timeout must be a number of seconds above 0, got {group_timeout!r}")


def _is_rank() -> bool:
    return dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def _call_here(
    fn: Callable[..., _T],
    ranks: int,
    args: tuple[Any, ...],
    backend: str,
    group_timeout: float,
    env: Mapping[str, str] | None,
) -> _T:
    existing = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if existing != ranks:
        raise InputError(
            f"launch() was asked for {ranks} ranks, and this process is one of {existing} already (WORLD_SIZE): pass "
            f"ranks={existing}, or start {ranks} with torchrun --nproc-per-node={ranks}; without torchrun, unset RANK "
            "and WORLD_SIZE"
        )
    os.environ.update(env or {})
    if dist.is_initialized():
        return fn(*args)
    with process_group(backend, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), group_timeout):
        return fn(*args)
