"""Waits for ranks, finds the one in which a failure began, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from ..errors import LaunchError
from ..text import numbered
from .rank import INTERRUPTED, SHOW_STACK, Failure, Meeting, Report

_PATIENCE = 5.0  # seconds for the rank with the fault to report it, once others have lost their connection to it
_GRACE = 2.0  # seconds between asking a rank to end and ending it


class Watch:
    """The processes of the ranks, in order, until all have ended."""

    def __init__(self, processes: Sequence[BaseProcess], meeting: Meeting, name: str, timeout: float | None) -> None:
        self.processes = processes
        self.meeting = meeting
        self.name = name
        self.timeout = timeout
        self._reports: dict[int, Report] = {}

    def results(self) -> list[Any]:
        """The values that the ranks return, when they have; the first failure of any of them as an error."""
        end = None if self.timeout is None else time.monotonic() + self.timeout
        give_up: float | None = None
        while len(self._reports) < len(self.processes):
            times = [moment for moment in (end, give_up) if moment is not None]
            ended = self._wait(min(times) - time.monotonic() if times else None)
            failures = [report.failure for report in self._reports.values() if report.failure is not None]
            if any(not failure.lost_connection for failure in failures):
                break
            if failures and give_up is None:
                give_up = time.monotonic() + _PATIENCE
            if not ended and give_up is not None and time.monotonic() >= give_up:
                break
            if not ended and end is not None and time.monotonic() >= end:
                raise self._too_late()
        self._raise_first_failure()
        return [self._reports[rank].value for rank in range(len(self.processes))]

    def _wait(self, seconds: float | None) -> list[int]:
        """The ranks that have ended, after at most so many seconds."""
        running = {process.sentinel: rank for rank, process in enumerate(self.processes) if rank not in self._reports}
        ready = connection.wait(list(running), None if seconds is None else max(0.0, seconds))
        ended = sorted(running[sentinel] for sentinel in ready if isinstance(sentinel, int))
        for rank in ended:
            self._reports[rank] = self._report(rank)
        return ended

    def _report(self, rank: int) -> Report:
        self.processes[rank].join()
        if not self.meeting.has_report(rank):
            return Report(failure=Failure(self._end_of(rank), "", time.time(), lost_connection=False))
        try:
            return self.meeting.take_report(rank)
        except Exception as error:
            text = f"its result cannot be read here ({error}): return tensors and plain values"
            return Report(failure=Failure(text, "", time.time(), lost_connection=False))

    def _end_of(self, rank: int) -> str:
        code = self.processes[rank].exitcode or 0
        if code < 0:
            name = {each.value: each.name for each in signal.Signals}.get(-code, f"signal {-code}")
            reason = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
            return f"it was killed by {name} before {self.name} returned{reason}"
        if code == INTERRUPTED:
            return f"it was interrupted before {self.name} returned"
        return (
            f"it ended with exit code {code} before {self.name} returned; what it printed tells why. (A new rank "
            'imports the script that calls launch(). What is to run once belongs below `if __name__ == "__main__":`)'
        )

    def _raise_first_failure(self) -> None:
        if all(report.failure is None for report in self._reports.values()):
            return
        running = {rank for rank in range(len(self.processes)) if rank not in self._reports}
        stop(self.processes)
        # Others may have left a report while the first was read: those that were not stopped by us.
        self._reports |= {rank: self._report(rank) for rank in running if self.meeting.has_report(rank)}
        failures = {rank: report.failure for rank, report in self._reports.items() if report.failure is not None}
        first = min(failures, key=lambda rank: (failures[rank].lost_connection, failures[rank].time))
        failure = failures[first]
        details = f"\n\nOn rank {first}:\n{failure.traceback}" if failure.traceback else ""
        raise LaunchError(f"rank {first} failed: {failure.error}{details}", first, failure.traceback)

    def _too_late(self) -> LaunchError:
        late = [rank for rank in range(len(self.processes)) if rank not in self._reports]
        stacks = self._stacks(late)
        stop(self.processes)
        who = numbered("rank", late)
        lines = [
            f"{self.name} had not returned on {who} after {self.timeout:g} s, and all ranks were stopped. They were in:"
        ]
        lines += [f"rank {rank}:\n{stacks[rank]}" for rank in late]
        return LaunchError("\n".join(lines), late[0], stacks[late[0]])

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """What ranks are doing, the innermost call first."""
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None  # it was started, and is waited for: the number is still its own
            os.kill(pid, SHOW_STACK)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and any(not self.meeting.stack(rank) for rank in ranks):
            time.sleep(0.05)
        return {rank: self.meeting.stack(rank) or "  (it had not begun, or does not answer)" for rank in ranks}


def stop(processes: Iterable[BaseProcess]) -> None:
    """End processes that have not ended: asked first, then not."""
    started = [process for process in processes if process.pid is not None]
    try:
        for process in started:
            process.terminate()
        end = time.monotonic() + _GRACE
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in started:
            process.kill()
            process.join()
