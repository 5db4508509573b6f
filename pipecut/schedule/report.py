"""What a simulated plan comes to: times, bubbles, memory, and why ranks wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .collector import collector_paused
from .costs import Costs
from .critical_path import critical_path
from .idle import Idle, idle_time
from .plan import Plan
from .record import Record
from .report_table import report_table
from .timeline import Span, Timeline


@dataclass(frozen=True)
class Report:
    """The result of `simulate`; everything is worked out when it is first asked for. Print it for a table.

    The timeline has the computations, and the sums of ties if they take time: transfers, sharding and other reductions
    take no time of a rank.
    """

    plan: Plan
    costs: Costs
    record: Record = field(repr=False)

    @cached_property
    @collector_paused
    def timeline(self) -> Timeline:
        """The start and the end of every computation, by rank and start."""
        record = self.record
        spans = list(map(Span, record.ranks, record.actions, record.starts, record.ends))
        ordered = tuple(spans[number] for row in self._numbers for number in row)
        return Timeline(self.plan.name, len(self.plan.actions), ordered)

    @cached_property
    def makespan(self) -> float:
        """When the last computation ends; the first starts at 0."""
        return max(self.record.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes, or sums what it shares with others."""
        starts, ends = self.record.starts, self.record.ends
        return tuple(sum(ends[number] - starts[number] for number in row) for row in self._numbers)

    @property
    def bubble_rate(self) -> float:
        """The idle part of the longest time between a rank's first start and its last end.

        This is the rate that matters in training, where a rank starts the next step without waiting for the others.
        """
        starts, ends = self.record.starts, self.record.ends
        return self._idle_part(max((ends[row[-1]] - starts[row[0]] for row in self._numbers if row), default=0.0))

    @property
    def bubble_rate_makespan(self) -> float:
        """The idle part of the makespan."""
        return self._idle_part(self.makespan)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank holds: a forward adds at its start, a backward frees at its end.

        The parts of an overlap start together. In a forward-only plan nothing is held longer than its forward.
        """
        memory = self.costs.table(self.plan).memory
        peaks = []
        for row in self._numbers:
            held = peak = 0.0
            for number in row:
                leaves = self.record.actions[number].leaves
                changes = [memory[op][stage] for stage, op, _, _, _ in leaves if op in memory]
                peak = max(peak, held + sum(change for change in changes if change > 0))
                held += sum(changes) if self.plan.training else 0.0
            peaks.append(peak)
        return tuple(peaks)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The longest chain of computations, each let start by the end of the one before it, or by its message."""
        return critical_path(self.record)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each rank by cause; with `busy` it sums up to the makespan."""
        return tuple(idle_time(self.record, row, self.makespan) for row in self._numbers)

    def __str__(self) -> str:
        return report_table(self)

    @cached_property
    def _numbers(self) -> list[list[int]]:
        """For each rank the numbers of its computations in the record."""
        return self.record.by_rank(len(self.plan.actions))

    def _idle_part(self, span: float) -> float:
        return max(0.0, 1 - sum(self.busy) / len(self.busy) / span) if span > 0 else 0.0
