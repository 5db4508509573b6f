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


def execute_with_threads(plan: Plan) -> str:
    """Run a plan with a thread for each rank and meetings that block; it is stuck once every rank waits in vain."""
    work, hall = Execution(plan), MeetingHall(len(plan.actions))
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

    def __init__(self, ranks: int) -> None:
        self.running = ranks
        self.waiting: dict[int, Callable[[], bool]] = {}  # rank -> what it waits for
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
                        self._wait(rank, partial(exist, request.values), request)
                    elif isinstance(request, Meeting):
                        self._meet(rank, request)
        except ExecutionError as failure:
            with self.news:
                self.failures.append(str(failure))
        finally:
            with self.news:
                self.running -= 1
                self.news.notify_all()

    def _meet(self, rank: int, meeting: Meeting) -> None:
        present = self.present.setdefault(meeting.about, set())
        present.add(rank)
        before = self.held.get(meeting.about, 0)
        if present == meeting.ranks:
            del self.present[meeting.about]
            self.held[meeting.about] = before + 1
            self.news.notify_all()
        self._wait(rank, lambda: self.held.get(meeting.about, 0) > before, meeting)

    def _wait(self, rank: int, ready: Callable[[], bool], request: Request) -> None:
        self.waiting[rank] = ready
        self.news.wait_for(lambda: ready() or bool(self.failures) or self._is_stuck())
        del self.waiting[rank]
        if not ready():
            raise ExecutionError("another rank failed" if self.failures else f"{STUCK} at {request}")

    def _is_stuck(self) -> bool:
        return len(self.waiting) == self.running and not any(ready() for ready in self.waiting.values())
