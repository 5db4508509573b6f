"""What a search for a plan comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..plan import Plan
from ..report import Report


@dataclass(frozen=True)
class Tried:
    """One way that was looked at: its time, if it fits, and why it was not taken."""

    name: str
    placement: str  # "loop x 2": two chunks a rank
    microbatches: int
    time: float | None
    why: str

    def __str__(self) -> str:
        time = "-" if self.time is None else f"{self.time:.6g}"
        return f"{self.name:<22} {self.placement:<10} {self.microbatches:>5} {time:>12}  {self.why}"


@dataclass(frozen=True)
class FoundPlan:
    """The best plan that a search found, and how good it can be at all. Print it for time, lower bound and gap."""

    plan: Plan
    report: Report = field(repr=False)
    time: float  # the longest span of a rank, or the makespan: what the search was asked to make small
    lower_bound: float  # no plan of any of the placements that were searched takes less
    objective: str
    tried: tuple[Tried, ...] = field(repr=False)
    ended_by_clock: bool = False  # then another run, or another machine, may find another plan

    @property
    def gap(self) -> float:
        """How far the time is above the lower bound, as a part of that."""
        return max(0.0, self.time / self.lower_bound - 1) if self.lower_bound > 0 else 0.0

    def table(self) -> str:
        """What was looked at, the best first: a line each."""
        head = f"{'schedule':<22} {'placement':<10} {'micro':>5} {self.objective:>12}  why not"
        return "\n".join([head, *map(str, self.tried)])

    def __str__(self) -> str:
        return (
            f"{self.plan.name}: {self.objective} {self.time:.6g}, lower bound {self.lower_bound:.6g}, "
            f"gap {100 * self.gap:.2f}%, bubble {100 * self.report.bubble_rate:.2f}%, "
            f"peak memory {max(self.report.peak_memory):.6g}"
        )
