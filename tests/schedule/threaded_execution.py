"""Plans executed with a thread for each rank, each blocking until the others have come to the same meeting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from pipecut.schedule.plan import Plan
from tests.schedule.blocking_channels import (
    RAN,
    STUCK,
    Execution,
    ExecutionError,
    Inputs,
    Meeting,
    Request,
    Steps,
    Value,
)


def execute_with_threads(plan: Plan, timeout: float) -> str:
    """Run a plan with a thread for each rank and meetings that block; a rank that waits too long is stuck."""
    work, hall = Execution(plan), MeetingHall(timeout)
    threads = [
        threading.Thread(target=hall.serve, args=(rank, work.rank(rank), work.exist), daemon=True)
        for rank in range(len(plan.actions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        if not hall.failures:
            work.check_complete()
    except ExecutionError as failure:
        hall.failures.append(str(failure))
    return hall.failures[0] if hall.failures else RAN


class MeetingHall:
    """Where threads wait for each other."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.failures: list[str] = []
        self.news = threading.Condition()
        self.present: dict[Value, set[int]] = {}
        self.held: dict[Value, int] = {}  # how often each meeting has taken place

    def serve(self, rank: int, steps: Steps, exist: Callable[[tuple[Value, ...]], bool]) -> None:
        """One rank's thread."""
        try:
            for request in steps:
                with self.news:
                    self.news.notify_all()
                    if isinstance(request, Inputs):
                        self._wait(partial(exist, request.values), request)
                    elif isinstance(request, Meeting):
                        self._meet(rank, request)
        except ExecutionError as failure:
            with self.news:
                self.failures.append(str(failure))
                self.news.notify_all()
        with self.news:
            self.news.notify_all()

    def _meet(self, rank: int, meeting: Meeting) -> None:
        present = self.present.setdefault(meeting.about, set())
        present.add(rank)
        before = self.held.get(meeting.about, 0)
        if present == meeting.ranks:
            del self.present[meeting.about]
            self.held[meeting.about] = before + 1
            self.news.notify_all()
        self._wait(lambda: self.held.get(meeting.about, 0) > before, meeting)

    def _wait(self, ready: Callable[[], bool], request: Request) -> None:
        if not self.news.wait_for(lambda: ready() or bool(self.failures), self.timeout):
            raise ExecutionError(f"{STUCK} at {request}")
        if not ready():
            raise ExecutionError("another rank failed")
