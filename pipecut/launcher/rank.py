"""The process of one rank: it joins the group, runs calls until it is asked to end, and reports each outcome.

The pool and its ranks exchange calls and outcomes as files in a directory of their own. Files outlive the process that
wrote them: nobody waits at a pipe whose other end was killed, and no port can be taken by another program.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LostConnectionError
from ..run import PATIENCE
from ..torch_internals import LOST_CONNECTION, forget_meshes, number_of_groups

Call = tuple[Callable[..., Any], tuple[Any, ...]]

# Sent to a rank: the number of a call, negative if it begins with a new group, or END.
END = None
SHOW_STACK = signal.SIGUSR1
INTERRUPTED = 128 + signal.SIGINT

_LAUNCHED_BY = "PIPECUT_LAUNCHED_BY"  # in the environment of a rank: the process that started it
GROUP_TIMEOUT = 600.0  # seconds, as for the waits of a schedule
_JOIN_GUARD = datetime.timedelta(minutes=30 * PATIENCE)  # a rank that dies before it joins is noticed by the pool

_has_begun = False


@dataclass(frozen=True)
class Outcome:
    """Result of a call on one rank: a value, an exception, or the end of the process."""

    rank: int
    value: Any = None
    error: str = ""  # name of the class of an exception
    text: str = ""  # its message
    traceback: str = ""
    died: str = ""  # how the process ended, or that it did not return in time
    seconds: float = 0.0
    time: float = 0.0  # of day, to find the first failure
    lost_connection: bool = False  # the fault is elsewhere: another rank was gone already
    summary: str = ""  # of the failure: class and message, or `died`
    made_groups: bool = False  # process groups of its own: the ranks join a new one for the next call

    @classmethod
    def of_error(cls, rank: int, error: BaseException, seconds: float = 0.0) -> Outcome:
        """Return the outcome of a call that raised."""
        return cls(
            rank,
            error=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(error)).rstrip(),
            seconds=seconds,
            time=time.time(),
            lost_connection=_is_lost_connection(error),
            summary="".join(traceback.format_exception_only(error)).strip(),
        )

    @classmethod
    def of_death(cls, rank: int, died: str, seconds: float = 0.0, stack: str = "") -> Outcome:
        """Return the outcome of a call whose process ended, or that does not return."""
        return cls(rank, died=died, traceback=stack, seconds=seconds, time=time.time(), summary=died)

    @property
    def failed(self) -> bool:
        """True if there is no value."""
        return bool(self.error or self.died)

    def __str__(self) -> str:
        end = self.died or self.error or "ended well"
        return f"----- rank {self.rank}: {end}, after {self.seconds:.1f} s\n{self.traceback}"


def _is_lost_connection(error: BaseException | None) -> bool:
    seen: list[BaseException] = []  # a cause may have the error that it caused as its context
    while error is not None and error not in seen:
        if isinstance(error, LostConnectionError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_CONNECTION):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class SharedFiles:
    """Files by which a pool and its ranks exchange calls and outcomes, numbered by call."""

    directory: str

    def store(self, number: int, ranks: int) -> Any:
        """Return the store through which the ranks join a group at a call."""
        return dist.FileStore(self._path(f"store-{number}"), ranks)  # type: ignore[attr-defined]  # torch has no stub

    def stack_path(self, rank: int) -> str:
        """Return the file to which a rank writes its stack on SHOW_STACK."""
        return self._path(f"stack-{rank}")

    def stack(self, rank: int) -> str:
        """Read the stack of a rank, without the heading."""
        path = Path(self.stack_path(rank))
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(line for line in lines if line.startswith("  "))

    def write_call(self, number: int, call: Call) -> None:
        """Save the function and its arguments, tensors by value."""
        torch.save(call, self._path(f"call-{number}"))

    def read_call(self, number: int) -> Call:
        """Load the function and its arguments, tensors on the CPU."""
        call: Call = torch.load(self._path(f"call-{number}"), map_location="cpu", weights_only=False)
        return call

    def call_mentions(self, number: int, name: str) -> bool:
        """Return True if a name is written in the file of a call."""
        return name.encode() in Path(self._path(f"call-{number}")).read_bytes()

    def write_outcome(self, number: int, outcome: Outcome) -> None:
        """Save an outcome: there is a whole one, or none."""
        path = self._outcome_path(number, outcome.rank)
        torch.save(outcome, f"{path}.unfinished")
        os.replace(f"{path}.unfinished", path)

    def has_outcome(self, number: int, rank: int) -> bool:
        """Return True if a rank has saved its outcome of a call."""
        return os.path.exists(self._outcome_path(number, rank))

    def read_outcome(self, number: int, rank: int) -> Outcome:
        """Load the outcome of a call on a rank, tensors on the CPU."""
        path = self._outcome_path(number, rank)
        outcome: Outcome = torch.load(path, map_location="cpu", weights_only=False)
        return outcome

    def remove(self, number: int) -> None:
        """Remove the files of a call."""
        for path in Path(self.directory).glob(f"*-{number}*"):
            if path.name.startswith((f"call-{number}", f"outcome-{number}-")):
                path.unlink()

    def _outcome_path(self, number: int, rank: int) -> str:
        return self._path(f"outcome-{number}-{rank}")

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


@dataclass(frozen=True)
class RankSettings:
    """Settings that one rank of a pool starts with."""

    rank: int
    ranks: int
    files: SharedFiles
    backend: str
    group_timeout: float
    env: Mapping[str, str]
    forked: bool
    inherits_groups: bool  # True if the process that it was forked from may have had process groups

    @property
    def environment(self) -> dict[str, str]:
        """Return `env`, and the variables that torchrun sets for a rank."""
        place = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
        return {**self.env, **{name: str(value) for name, value in place.items()}}


@contextlib.contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore all of them afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def starting_environment(settings: RankSettings) -> dict[str, str]:
    """Return the environment in which to start a rank: its imports may read it at once."""
    return {**settings.environment, _LAUNCHED_BY: str(os.getpid())}


def is_starting() -> bool:
    """Return True if this process will be a rank, and is still importing its script."""
    return os.environ.get(_LAUNCHED_BY) == str(os.getppid()) and not _has_begun


def run_rank(settings: RankSettings, pipe: connection.Connection, first: Call | None) -> None:
    """Run a rank: the main function of its process. A fork has the first call already; a new process reads it."""
    global _has_begun
    _has_begun = True
    _end_with_parent()
    os.environ.update(settings.environment)
    if settings.forked:
        torch.set_num_threads(1)  # with more, the fork of a process that had several hangs
    with open(settings.files.stack_path(settings.rank), "w") as stack:
        faulthandler.register(SHOW_STACK, file=stack, all_threads=False)
        try:
            _serve(settings, pipe, first)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        faulthandler.unregister(SHOW_STACK)
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(settings: RankSettings, pipe: connection.Connection, first: Call | None) -> None:
    """Run one call after the other."""
    while (number := pipe.recv()) is not END:
        if number < 0:  # the groups of the calls so far are of no more use: each has threads that poll
            number = -number
            dist.destroy_process_group()
            if not settings.inherits_groups:  # groups of another process cannot be ended here: their threads are there
                forget_meshes()
        start = time.monotonic()
        try:
            value = _run_call(settings, number, first)
            seconds = time.monotonic() - start
            outcome = Outcome(settings.rank, value, seconds=seconds, made_groups=number_of_groups() > 1)
        except (Exception, SystemExit) as error:
            outcome = Outcome.of_error(settings.rank, _without_own_frames(error), time.monotonic() - start)
        first = None
        sys.stdout.flush()
        sys.stderr.flush()
        _report(settings.files, number, outcome)
        pipe.send(number)


def _run_call(settings: RankSettings, number: int, call: Call | None) -> Any:
    function, args = settings.files.read_call(number) if call is None else call
    if not dist.is_initialized():
        _join(settings, number)
    try:
        return function(*args)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        return None


def _join(settings: RankSettings, number: int) -> None:
    """Join the group once every rank is ready, so that a short timeout of the group bounds no slow start."""
    store = settings.files.store(number, settings.ranks)
    store.set(f"rank {settings.rank}", "here")
    store.wait([f"rank {rank}" for rank in range(settings.ranks)], _JOIN_GUARD)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _loopback())  # also for the groups that a call makes
    place = {"store": store, "rank": settings.rank, "world_size": settings.ranks}
    _init_process_group(settings.backend, settings.rank, settings.group_timeout, **place)


def _loopback() -> str:
    """Return the name of the network interface that no other machine reaches: all ranks are on this one."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _without_own_frames(error: BaseException) -> BaseException:
    """Return the error with a traceback that begins in the user's function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def _report(files: SharedFiles, number: int, outcome: Outcome) -> None:
    try:
        files.write_outcome(number, outcome)
    except Exception as error:
        kind = type(outcome.value).__name__
        text = f"its result, of type {kind}, cannot be sent ({error}): return tensors and plain values"
        failure = Outcome.of_error(outcome.rank, TypeError(text), outcome.seconds)
        files.write_outcome(number, replace(failure, traceback="", summary=text))


@contextlib.contextmanager
def process_group(backend: str, local_rank: int, timeout: float) -> Iterator[None]:
    """Initialise torch.distributed from the environment, as long as the block runs."""
    _init_process_group(backend, local_rank, timeout)
    yield
    # After an error the others may be waiting: then the end of the process has to do.
    if dist.is_initialized():
        dist.destroy_process_group()


def _init_process_group(backend: str, local_rank: int, timeout: float, **place: Any) -> None:
    """Initialise torch.distributed; a backend of devices gets one device per rank."""
    if backend != "gloo" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    # All have joined before any goes on: one that soon ends would close connections that others are still making.
    with changed_environment({"TORCH_DIST_INIT_BARRIER": "1"}):
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), **place)


def _end_with_parent() -> None:
    """Kill this process when its parent ends: nobody would be left to stop it."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # it was started by one

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
