"""Where a launch and its ranks leave things for each other: files in a directory of their own.

Files outlive the process that wrote them. So nobody waits at a pipe whose other end was killed, and no port can be
taken by somebody else in the meantime.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
