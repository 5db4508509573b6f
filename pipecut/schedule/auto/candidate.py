"""Rows that were found, how they were found, and which of two is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .problem import Problem, Row
from .timing import Timing

Merit = tuple[float, float]
OBJECTIVES = ("span", "makespan")


@dataclass(frozen=True)
class Candidate:
    """One way to do a problem."""

    name: str
    problem: Problem
    rows: Sequence[Row]
    timing: Timing

    def merit(self, objective: str) -> Merit:
        """The less the better: the time that is asked for, then the other one."""
        return merit(self.timing, objective)


def merit(timing: Timing, objective: str) -> Merit:
    """The time that is asked for, then the other one; rounded, so that sums in another order compare equal."""
    times = timing.span, timing.makespan
    first, second = times if objective == "span" else reversed(times)
    return float(f"{first:.12g}"), float(f"{second:.12g}")
