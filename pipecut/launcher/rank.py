"""What happens in the process of one rank: it joins the others, calls the function, and leaves a report."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# MERGED: Where a launch and its ranks leave things for each other: files in a directory of their own.
# MERGED:
# MERGED: Files outlive the process that wrote them. So nobody waits at a pipe whose other end was killed, and no
# MERGED: port can be
# MERGED: taken by somebody else in the meantime.


Call = tuple[Callable[..., Any], tuple[Any, ...]]

# What torch.distributed says when it is another rank that has gone, or does not answer.
_LOST = ("Connection closed", "Connection reset", "pair closure", "Broken pipe", "imed out", "imeout", "NCCL")


@dataclass(frozen=True)
class Failure:
    """How a call ended on one rank. With a lost connection the fault is elsewhere: there somebody was gone already."""

    error: str
    traceback: str
    time: float
    lost_connection: bool

    @classmethod
    def of(cls, error: BaseException, time: float) -> Failure:
        """What is to be known of an error in another process."""
        return cls(
            "".join(traceback.format_exception_only(error)).strip(),
            "".join(traceback.format_exception(error)).rstrip(),
            time,
            _is_lost_connection(error),
        )


def _is_lost_connection(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class Report:
    """What a rank leaves behind when it is done: a value, or a failure."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Meeting:
    """The directory, and what every rank of a launch knows."""

    directory: str
    ranks: int
    backend: str

    @property
    def store(self) -> str:
        """The file, as a URL, through which torch.distributed brings the ranks together."""
        return f"file://{self._path('store')}"

    def stack_file(self, rank: int) -> str:
        """Where a rank writes what it is doing, when it is asked."""
        return self._path(f"stack-{rank}")

    def stack(self, rank: int) -> str:
        """What it has written, without the heading."""
        path = Path(self.stack_file(rank))
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(line for line in lines if line.startswith("  "))

    def leave_call(self, call: Call) -> None:
        """For ranks that are new processes: the function and its arguments, tensors by value."""
        torch.save(call, self._path("call"))

    def take_call(self) -> Call:
        """The function and its arguments, tensors on the CPU."""
        call: Call = torch.load(self._path("call"), map_location="cpu", weights_only=False)
        return call

    def call_mentions(self, name: str) -> bool:
        """Whether a name is written in what `leave_call` saved."""
        return name.encode() in Path(self._path("call")).read_bytes()

    def leave_report(self, rank: int, report: Report) -> None:
        """The last thing that a rank does: there is a whole report, or none."""
        path = self._path(f"report-{rank}")
        torch.save(report, f"{path}.unfinished")
        os.replace(f"{path}.unfinished", path)

    def has_report(self, rank: int) -> bool:
        """Whether a rank got so far as to leave one."""
        return os.path.exists(self._path(f"report-{rank}"))

    def take_report(self, rank: int) -> Report:
        """What a rank has left, tensors on the CPU."""
        report: Report = torch.load(self._path(f"report-{rank}"), map_location="cpu", weights_only=False)
        return report

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


_LAUNCHED_BY = "PIPECUT_LAUNCHED_BY"  # in the environment of a rank: the process that started it
SHOW_STACK = signal.SIGUSR1
INTERRUPTED = 128 + signal.SIGINT

_has_begun = False


def is_starting() -> bool:
    """Whether this process is to be a rank, and is still importing what it needs."""
    return os.environ.get(_LAUNCHED_BY) == str(os.getppid()) and not _has_begun


def environment_of(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun puts into the environment of a rank, as far as it depends on the rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in place.items()} | {_LAUNCHED_BY: str(os.getpid())}


def run_rank(rank: int, meeting: Meeting, call: Call | None) -> None:
    """The main function of a rank. A forked one has the call already; a new process reads it."""
    global _has_begun
    _has_begun = True
    _end_with_parent()
    if call is not None:
        torch.set_num_threads(1)  # with more, the fork of a process that had several hangs
    with open(meeting.stack_file(rank), "w") as stack:
        faulthandler.register(SHOW_STACK, file=stack, all_threads=False)
        try:
            report = Report(_call(rank, meeting, call))
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        except (Exception, SystemExit) as error:
            report = Report(failure=Failure.of(_from_the_function(error), time.time()))
        _leave(rank, meeting, report)
        faulthandler.unregister(SHOW_STACK)


def _call(rank: int, meeting: Meeting, call: Call | None) -> Any:
    function, args = meeting.take_call() if call is None else call
    with process_group(meeting.backend, rank, init_method=meeting.store, rank=rank, world_size=meeting.ranks):
        try:
            return function(*args)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            return None


def _from_the_function(error: BaseException) -> BaseException:
    """An error whose traceback begins where the user's function does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def _leave(rank: int, meeting: Meeting, report: Report) -> None:
    try:
        meeting.leave_report(rank, report)
    except Exception as error:
        kind = type(report.value).__name__
        text = f"its result, of type {kind}, cannot be sent ({error}): return tensors and plain values"
        report = Report(failure=Failure(text, "", time.time(), lost_connection=False))
        meeting.leave_report(rank, report)
    if report.failure is not None:
        # Not the usual end: it may wait for others, who wait for this rank.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def process_group(backend: str, local_rank: int, **place: Any) -> Iterator[None]:
    """torch.distributed, initialised for as long as the function runs. A backend of devices gets one for each rank."""
    if backend != "gloo" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    # All have met before anyone goes on: one that soon ends would close connections that others are still making.
    with patch.dict(os.environ, {"TORCH_DIST_INIT_BARRIER": "1"}):
        dist.init_process_group(backend, **place)
    yield
    # After an error the others may be waiting: then the end of the process has to do.
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """Nobody would be left to stop a rank whose parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # it was started by one

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
