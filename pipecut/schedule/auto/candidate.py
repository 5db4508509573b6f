"""Candidates of a search: checked rows with their times, the fixed schedules among them, and the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import PlanError
from ..plan import Plan
from ..registry import FAMILIES, plan_for
from ..report import Report
from .problem import FORWARD, FULL, INPUT, WEIGHT, Excess, Problem, Row
from .timing import Clock, Timing

_Merit = tuple[float, float]
OBJECTIVES = ("span", "makespan")


@dataclass(frozen=True)
class Candidate:
    """One solution of a problem, made by `checked_candidate`."""

    name: str
    problem: Problem
    rows: Sequence[Row]
    timing: Timing

    def merit(self, objective: str) -> _Merit:
        """Return the time of the objective, then the other one: less is better."""
        return merit(self.timing, objective)


def checked_candidate(name: str, clock: Clock, rows: Sequence[Row]) -> Candidate | None:
    """Return the candidate of these rows; None if passes are missing or a rank would hold more than its limit.

    Rows become candidates here and nowhere else, so that none can be chosen that does not fit.
    """
    problem = clock.problem
    if not problem.has_all_passes(rows) or not all(clock.fits(rank, row) for rank, row in enumerate(rows)):
        return None
    timing = clock.times(rows)
    assert timing is not None, name  # whoever makes rows goes through them in an order that their messages allow
    return Candidate(name, problem, rows, timing)


def merit(timing: Timing, objective: str) -> _Merit:
    """Return the time of the objective, then the other one; rounded, so that sums in another order compare equal."""
    times = timing.span, timing.makespan
    first, second = times if objective == "span" else reversed(times)
    return float(f"{first:.12g}"), float(f"{second:.12g}")


def cost(timing: Timing, objective: str) -> float:
    """Return the time that counts and, with little weight, that of all ranks: many of them may be the longest."""
    times = timing.times(objective)
    return max(times) + 0.1 * sum(times) / len(times)


@dataclass(frozen=True)
class Tried:
    """One candidate in the table of a search: its time, if it fits, and why it was not taken."""

    name: str
    placement: str  # "loop x 2": two chunks per rank
    microbatches: int
    time: float | None
    why: str

    def __str__(self) -> str:
        time = "-" if self.time is None else f"{self.time:.6g}"
        return f"{self.name:<22} {self.placement:<10} {self.microbatches:>5} {time:>12}  {self.why}"


@dataclass(frozen=True)
class FoundPlan:
    """The best plan of a search, with a lower bound. Print it for time, lower bound and gap."""

    plan: Plan
    report: Report = field(repr=False)
    time: float  # the objective: the longest span of a rank, or the makespan
    lower_bound: float  # no plan of any of the placements that were searched takes less
    objective: str
    tried: tuple[Tried, ...] = field(repr=False)
    ended_by_clock: bool = False  # then another run, or another machine, may find another plan

    @property
    def gap(self) -> float:
        """The part of the lower bound by which the time is above it."""
        return max(0.0, self.time / self.lower_bound - 1) if self.lower_bound > 0 else 0.0

    def table(self) -> str:
        """Return a line for each candidate, the best first."""
        head = f"{'schedule':<22} {'placement':<10} {'micro':>5} {self.objective:>12}  why not"
        return "\n".join([head, *map(str, self.tried)])

    def __str__(self) -> str:
        return (
            f"{self.plan.name}: {self.objective} {self.time:.6g}, lower bound {self.lower_bound:.6g}, "
            f"gap {100 * self.gap:.2f}%, bubble {100 * self.report.bubble_rate:.2f}%, "
            f"peak memory {max(self.report.peak_memory):.6g}"
        )


_ONE_AT_A_TIME = "one microbatch at a time"


def fixed_candidates(clock: Clock) -> Iterator[tuple[str, Candidate | Excess | str]]:
    """Yield the name of every fixed schedule with this placement, and its candidate or the reason why it is out."""
    problem = clock.problem
    for name, rows in _rows(problem):
        if isinstance(rows, str):
            yield name, rows
        else:
            yield name, checked_candidate(name, clock, rows) or Excess(name, problem.limits, tuple(clock.peaks(rows)))


def _rows(problem: Problem) -> Iterator[tuple[str, list[Row] | str]]:
    """Yield the rows of each schedule, or the reason why it cannot be made for these sizes."""
    placement, microbatches = problem.placement, problem.microbatches
    chunks = placement.stages // placement.ranks
    # Those made for this number of chunks go first: of equals, the first is taken.
    for name, family in sorted(FAMILIES.items(), key=lambda each: each[1].chunks != chunks):
        if family.training and (family.any_chunks or family.chunks == chunks):
            try:
                plan = plan_for(name, ranks=placement.ranks, microbatches=microbatches, chunks=chunks)
            except PlanError as error:
                yield name, str(error)
                continue
            if plan.placement == placement:
                yield name, [problem.row_of(actions) for actions in plan.actions]
    yield _ONE_AT_A_TIME, [_one_at_a_time(problem, stages) for stages in placement.stages_of]


def _one_at_a_time(problem: Problem, stages: tuple[int, ...]) -> Row:
    """Run a microbatch after the other, with the least memory: this fits if any order does.

    A weight gradient that frees memory is made in one with the input gradient, so that its memory is never held;
    one that takes memory comes when all else is done. No order needs less where no forward frees memory and no full
    backward takes any: a rank holds all forwards of a microbatch before its first backward, besides what the
    microbatches before have left.
    """
    late = [stage for stage in stages if problem.growth[WEIGHT][stage] > 0]
    kinds = [(FORWARD, stage) for stage in stages]
    kinds += [(INPUT if stage in late else FULL, stage) for stage in reversed(stages)]
    microbatches = range(problem.microbatches)
    order = [(kind, stage, microbatch) for microbatch in microbatches for kind, stage in kinds]
    order += [(WEIGHT, stage, microbatch) for microbatch in microbatches for stage in late]
    return [(kind * problem.stages + stage) * len(microbatches) + microbatch for kind, stage, microbatch in order]
