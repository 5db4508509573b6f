"""Timelines, and the result of a simulation: times, bubbles, memory, and the reasons why ranks wait."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .action import Action, Op
from .costs import Costs
from .plan import Plan, collector_paused

if TYPE_CHECKING:
    from .big_record import BigRecord

# Timelines: the start and the end of actions, simulated or executed.


class Span(NamedTuple):
    """One action of one rank, from start to end."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks, by rank and start."""

    name: str
    ranks: int
    spans: tuple[Span, ...] = field(repr=False)
    unit: str = ""  # of the times, as in "ms"; empty where they are relative

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, in order."""
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    @cached_property
    def start(self) -> float:
        """The start of the first span."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """The end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)


class Wait(IntEnum):
    """The last thing that a computation came to wait for."""

    RANK = 0  # its rank, busy with the computation before it
    FORWARD = 1  # an activation of another rank
    BACKWARD = 2  # a gradient of another rank


@dataclass(frozen=True)
class Record:
    """The computations of a run, numbered in an order in which they can run.

    Flat arrays, since a plan may have a million computations and most questions concern a few of these columns.
    """

    ranks: array[int] = field(default_factory=lambda: array("l"))
    actions: list[Action] = field(default_factory=list)
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    before: array[int] = field(default_factory=lambda: array("l"))  # the computation whose end let this start, or -1
    waits: array[int] = field(default_factory=lambda: array("b"))  # a Wait

    def add(self, rank: int, action: Action, start: float, end: float, before: int, wait: int) -> None:
        """Record one computation."""
        self.ranks.append(rank)
        self.actions.append(action)
        self.starts.append(start)
        self.ends.append(end)
        self.before.append(before)
        self.waits.append(wait)

    def by_rank(self, ranks: int) -> Sequence[Sequence[int]]:
        """Return the numbers of each rank's computations, in order."""
        rows: list[list[int]] = [[] for _ in range(ranks)]
        for number, rank in enumerate(self.ranks):
            rows[rank].append(number)
        return rows

    def span(self, number: int) -> Span:
        """Return one computation."""
        return Span(self.ranks[number], self.actions[number], self.starts[number], self.ends[number])

    def spans(self, rows: Sequence[Sequence[int]]) -> tuple[Span, ...]:
        """Return all computations by rank and start."""
        spans = list(map(Span, self.ranks, self.actions, self.starts, self.ends))
        return tuple(spans[number] for row in rows for number in row)

    def last(self) -> int:
        """Return the number of the computation that ends last, or -1."""
        return max(range(len(self.ends)), key=self.ends.__getitem__, default=-1)

    def busy(self, row: Sequence[int]) -> float:
        """Return the time that a rank computes."""
        return sum(self.ends[number] - self.starts[number] for number in row)

    def peak(self, row: Sequence[int], memory: Mapping[Op, tuple[float, ...]], *, training: bool) -> float:
        """Return the most that a rank holds."""
        held = peak = 0.0
        for number in row:
            changes = [memory[op][stage] for stage, op, _, _, _ in self.actions[number].leaves if op in memory]
            peak = max(peak, held + sum(change for change in changes if change > 0))
            held += sum(changes) if training else 0.0
        return peak

    def idle(self, row: Sequence[int], makespan: float) -> Idle:
        """Return the idle time of a rank by its cause; one that waits for several values waits for the last of them."""
        if not row:
            return Idle(0.0, 0.0, 0.0, 0.0, end=makespan)
        starts, ends = self.starts, self.ends
        forward = backward = transfer = 0.0
        free = starts[row[0]]
        for number in row:
            gap = starts[number] - free
            free = ends[number]
            if gap <= 0:
                continue
            wait, before = self.waits[number], self.before[number]
            # A rank that waits without a message waits in the sum of a tie: some gradient is not there yet.
            wire = 0.0 if wait == Wait.RANK else min(gap, starts[number] - (ends[before] if before >= 0 else 0.0))
            transfer += wire
            if wait == Wait.FORWARD:
                forward += gap - wire
            else:
                backward += gap - wire
        return Idle(starts[row[0]], forward, backward, transfer, makespan - free)


class Idle(NamedTuple):
    """The idle time of one rank, by its cause. With the rank's busy time it sums up to the makespan."""

    start: float  # before the rank's first computation
    forward: float  # an activation is not computed yet, or not sent
    backward: float  # a gradient is not computed yet, or not sent
    transfer: float  # a message is on the wire
    end: float  # after the rank's last computation

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self)


@dataclass(frozen=True)
class Report:
    """The result of `simulate`; everything is computed on first use. Print it for a table.

    The timeline has the computations, and the sums of ties if they take time: transfers, sharding and other reductions
    take no time of a rank.
    """

    plan: Plan
    costs: Costs
    record: Record | BigRecord = field(repr=False)

    @cached_property
    @collector_paused
    def timeline(self) -> Timeline:
        """The start and the end of every computation, by rank and start."""
        return Timeline(self.plan.name, len(self.plan.actions), self.record.spans(self._numbers))

    @cached_property
    def makespan(self) -> float:
        """The end of the last computation; the first starts at 0."""
        last = self.record.last()
        return float(self.record.ends[last]) if last >= 0 else 0.0

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes, or sums tied gradients."""
        return tuple(map(self.record.busy, self._numbers))

    @property
    def bubble_rate(self) -> float:
        """The idle part of the longest time between a rank's first start and its last end.

        This is the rate that matters in training, where a rank starts the next step without waiting for the others.
        """
        starts, ends = self.record.starts, self.record.ends
        return self._idle_part(
            float(max((ends[row[-1]] - starts[row[0]] for row in self._numbers if row), default=0.0))
        )

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
        return tuple(self.record.peak(row, memory, training=self.plan.training) for row in self._numbers)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The longest chain of computations, each started by the end of the one before it, or by its message."""
        return _critical_path(self.record)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each rank by cause; with `busy` it sums up to the makespan."""
        return tuple(self.record.idle(row, self.makespan) for row in self._numbers)

    def __str__(self) -> str:
        return _report_table(self)

    @cached_property
    def _numbers(self) -> Sequence[Sequence[int]]:
        """For each rank the numbers of its computations in the record."""
        return self.record.by_rank(len(self.plan.actions))

    def _idle_part(self, span: float) -> float:
        return max(0.0, 1 - sum(self.busy) / len(self.busy) / span) if span > 0 else 0.0


def _critical_path(record: Record | BigRecord) -> tuple[Span, ...]:
    """Return the chain from the first computation to the one that ends last, each started by the end of the one before.

    Two that follow each other are on one rank, or a message goes from the rank of the first to that of the second; then
    the second starts when that message arrives.
    """
    number = record.last()
    path = []
    while number >= 0:
        path.append(record.span(number))
        number = int(record.before[number])
    return tuple(reversed(path))


_HEAD = ("rank", "busy", *Idle._fields, "peak memory")
_NOISE = 1e-9  # of the makespan: less than that is the rounding of sums


def _report_table(report: Report) -> str:
    """Return totals, then for each rank its busy time, its idle time by cause, and its peak memory."""
    rows = [(str(rank), *_cells(report, rank)) for rank in range(len(report.busy))]
    return "\n".join([*_totals(report), *_aligned([_HEAD, *rows, ("mean", *_means(report))])])


def _totals(report: Report) -> list[str]:
    plan, path = report.plan, report.critical_path
    sizes = f"{len(plan.actions)} ranks, {plan.stages} stages, {plan.microbatches} microbatches"
    rates = f"{report.bubble_rate:.2%} by each rank's own span, {report.bubble_rate_makespan:.2%} by the makespan"
    lines = [f"{plan.name}: {sizes}", f"makespan {report.makespan:.6g}", f"bubble rate {rates}"]
    if path:
        ends = f"from {path[0].action} on rank {path[0].rank} to {path[-1].action} on rank {path[-1].rank}"
        lines.append(f"critical path of {len(path)} computations, {ends}")
    return lines


def _cells(report: Report, rank: int) -> list[str]:
    times = [_text(time, report.makespan) for time in (report.busy[rank], *report.idle[rank])]
    return [*times, f"{report.peak_memory[rank]:.6g}"]


def _means(report: Report) -> list[str]:
    columns = [report.busy, *zip(*report.idle, strict=True)]
    means = [_text(sum(column) / len(column), report.makespan) for column in columns]
    return [*means, f"{sum(report.peak_memory) / len(report.peak_memory):.6g}"]


def _text(time: float, makespan: float) -> str:
    return f"{time:.6g}" if abs(time) > _NOISE * makespan else "0"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns, the numbers to the right; idle time stands between two bars."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"{cells[0]} │ {cells[1]} │ {'  '.join(cells[2:-1])} │ {cells[-1]}")
    idle = len("  ".join("-" * width for width in widths[2:-1]))
    title = "idle by cause".center(idle)
    lines.insert(0, f"{' ' * widths[0]} │ {' ' * widths[1]} │ {title} │".rstrip())
    return lines
