"""Rows that were found, how they were found, and which of two is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .problem import Problem, Row
from .timing import Clock, Timing

Merit = tuple[float, float]
OBJECTIVES = ("span", "makespan")


@dataclass(frozen=True)
class Candidate:
    """One way to do a problem, made by `accepted`."""

    name: str
    problem: Problem
    rows: Sequence[Row]
    timing: Timing

    def merit(self, objective: str) -> Merit:
        """The less the better: the time that is asked for, then the other one."""
        return merit(self.timing, objective)


def accepted(name: str, clock: Clock, rows: Sequence[Row]) -> Candidate | None:
    """The candidate of these rows; None if passes are missing or a rank would hold more than its limit.

    Whatever makes rows, they become a candidate here and nowhere else, so that none can be chosen that does not fit.
    """
    problem = clock.problem
    if not problem.has_all_passes(rows) or not all(clock.fits(rank, row) for rank, row in enumerate(rows)):
        return None
    timing = clock.times(rows)
    assert timing is not None, name  # whoever makes rows goes through them in an order that their messages allow
    return Candidate(name, problem, rows, timing)


def merit(timing: Timing, objective: str) -> Merit:
    """The time that is asked for, then the other one; rounded, so that sums in another order compare equal."""
    times = timing.span, timing.makespan
    first, second = times if objective == "span" else reversed(times)
    return float(f"{first:.12g}"), float(f"{second:.12g}")
