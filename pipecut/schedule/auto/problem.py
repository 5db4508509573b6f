"""The problem of a search as plain lists: times, travel and memory by stage, limits by rank.

A pass is one number, (kind * stages + stage) * microbatches + microbatch, so that the search works on lists of whole
numbers and makes actions only of the plan that it gives back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from functools import cached_property

from ...errors import PlanError
from ..action import Action, Op
from ..costs import MEMORY, TIMES, Costs, Link, checked_number
from ..plan import Plan
from ..rules import Dataflow, Placement, check_positive

MemoryLimit = float | Sequence[float] | None
_TOLERANCE = 1e-9  # of a limit: sums of many amounts are not exact


def limits_of(memory_limit: MemoryLimit, ranks: int) -> tuple[float, ...]:
    """Return one limit for each rank; inf stands for none.

    >>> limits_of(3, ranks=2), limits_of([3, math.inf], ranks=2), limits_of(None, ranks=2)
    ((3.0, 3.0), (3.0, inf), (inf, inf))
    """
    if memory_limit is None:
        return (math.inf,) * ranks
    if not isinstance(memory_limit, Sequence) or isinstance(memory_limit, str | bytes):
        return (checked_number("memory_limit", memory_limit, allow_inf=True),) * ranks
    if len(memory_limit) != ranks:
        raise PlanError(f"memory_limit has {len(memory_limit)} numbers for {ranks} ranks: give one for each, or one.")
    return tuple(
        checked_number(f"memory_limit[{rank}]", each, allow_inf=True) for rank, each in enumerate(memory_limit)
    )


def _ceiling(limit: float) -> float:
    """Return the most that counts as within a limit."""
    return limit + _TOLERANCE * limit


@dataclass(frozen=True)
class Excess:
    """A schedule that does not fit, with the memory that each rank would hold."""

    name: str
    limits: tuple[float, ...]
    peaks: tuple[float, ...]

    @property
    def missing(self) -> float:
        """The excess of the worst rank."""
        return self._over[self.worst]

    @property
    def worst(self) -> int:
        """The rank that is furthest over its limit."""
        return self._over.index(max(self._over))

    @property
    def _over(self) -> list[float]:
        return [peak - limit for peak, limit in zip(self.peaks, self.limits, strict=True)]

    def __str__(self) -> str:
        return f"rank {self.worst} would hold {self.peaks[self.worst]:.6g}, its limit is {self.limits[self.worst]:.6g}"


def no_plan_fits(every: Sequence[Excess]) -> PlanError:
    """Return the error if no schedule fits, nor one microbatch at a time, with the least limit that would do."""
    least = min(every, key=lambda each: (each.missing, sum(each.peaks)))
    same = min(least.limits) == max(least.limits)
    # A rank without a limit keeps none.
    enough = [
        limit if math.isinf(limit) else _rounded_up(peak) for peak, limit in zip(least.peaks, least.limits, strict=True)
    ]
    rank = least.worst
    remedy = (
        f"the least memory_limit that would do is {_rounded_up(max(least.peaks)):.6g}"
        if same
        else f"the least limits that would do are {enough}"
    )
    return PlanError(
        f"No plan fits the memory limit: rank {rank} may hold {least.limits[rank]:.6g}, and {least.name} needs "
        f"{least.peaks[rank]:.6g} there; {remedy}. Raise it, or make the microbatches smaller."
    )


def _rounded_up(value: float) -> float:
    """Round up to six digits: a limit that an error names must do.

    >>> _rounded_up(8589934592.0), _rounded_up(0.1 + 0.2)
    (8589940000.0, 0.3)
    """
    near = float(f"{value:.6g}")
    if value <= _ceiling(near):
        return near
    return float(Context(prec=6, rounding=ROUND_CEILING).plus(Decimal(value)))


Row = list[int]
_KINDS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD)
FORWARD, INPUT, WEIGHT, FULL = range(4)


@dataclass(frozen=True)
class Problem:
    """One placement and one number of microbatches, with their costs."""

    placement: Placement
    microbatches: int
    time: tuple[tuple[float, ...], ...]  # [kind][stage]
    growth: tuple[tuple[float, ...], ...]  # of the memory held, [kind][stage]; negative where it is freed
    down: tuple[float, ...]  # [stage]: how long its activation travels to the stage after; 0 on the same rank
    up: tuple[float, ...]  # [stage]: how long its gradient travels to the stage before
    limits: tuple[float, ...]  # [rank]
    costs: Costs

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    @cached_property
    def passes(self) -> int:
        """The number of passes if every backward is in two."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def ceilings(self) -> tuple[float, ...]:
        """The most that counts as within the limit, by rank."""
        return tuple(map(_ceiling, self.limits))

    def has_all_passes(self, rows: Iterable[Row]) -> bool:
        """Return True if nothing is missing in rows without repetitions. A full backward stands for both halves."""
        block = self.stages * self.microbatches
        return sum(2 if number >= FULL * block else 1 for row in rows for number in row) == self.passes

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The least time that each rank computes."""
        one = [
            self.time[FORWARD][stage] + min(self.time[FULL][stage], self.time[INPUT][stage] + self.time[WEIGHT][stage])
            for stage in range(self.stages)
        ]
        return tuple(self.microbatches * sum(one[stage] for stage in held) for held in self.placement.stages_of)

    def row_of(self, actions: Iterable[Action | None]) -> Row:
        """Return the numbers of a rank's actions; the parts of an overlap one after the other."""
        number_of = {op: kind for kind, op in enumerate(_KINDS)}
        return [
            (number_of[leaf.op] * self.stages + leaf.stage) * self.microbatches + (leaf.microbatch or 0)
            for action in actions
            if action is not None
            for leaf in action.leaves
        ]

    def plan_of(self, name: str, rows: Sequence[Sequence[int]]) -> Plan:
        """Return the plan of numbered rows."""
        made = [
            Action(stage, op, microbatch)
            for op in _KINDS
            for stage in range(self.stages)
            for microbatch in range(self.microbatches)
        ]
        actions = tuple(tuple(made[number] for number in row) for row in rows)
        return Plan(name, self.placement, self.microbatches, actions, Dataflow.chain(self.stages))


def problem_for(placement: Placement, microbatches: int, costs: Costs, limits: Sequence[float]) -> Problem:
    """Return the problem of a placement, whose costs are looked up once."""
    rows = ((),) * placement.ranks  # only the stages of the plan count
    empty = Plan("auto", placement, microbatches, rows, Dataflow.chain(placement.stages))
    table = costs.table(empty)
    last = placement.stages - 1
    return Problem(
        placement=placement,
        microbatches=microbatches,
        time=tuple(table.time[op] for op in _KINDS),
        growth=tuple(table.memory[op] for op in _KINDS),
        down=tuple(_travel(placement, costs, Op.SEND_F, stage, min(stage + 1, last)) for stage in range(last + 1)),
        up=tuple(_travel(placement, costs, Op.SEND_B, stage, max(stage - 1, 0)) for stage in range(last + 1)),
        limits=tuple(limits),
        costs=costs,
    )


def _travel(placement: Placement, costs: Costs, send: Op, stage: int, other: int) -> float:
    if placement.rank_of[stage] == placement.rank_of[other]:
        return 0.0
    return costs.message_time(placement, send, stage, other)


_PLACEMENTS = ("loop", "v", "any")
_CHUNKS = {"loop": (1, 2), "v": (2,)}  # that are tried by default


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A placement, a number of microbatches, and the costs of one of them."""

    shape: str  # "loop" or "v"
    chunks: int
    placement: Placement
    microbatches: int
    costs: Costs

    def __str__(self) -> str:
        return f"{self.shape} x {self.chunks}"


def arrangements(
    ranks: int, microbatches: int | Sequence[int], costs: Costs, placement: str, chunks: int | None
) -> list[Arrangement]:
    """Return all arrangements that are allowed, in the order in which they are tried."""
    check_positive(ranks=ranks)
    if placement not in _PLACEMENTS:
        raise PlanError(f"placement={placement!r}: give one of {', '.join(map(repr, _PLACEMENTS))}.")
    if not isinstance(costs, Costs):
        raise PlanError(f"costs={costs!r}: give Costs, as in Costs(forward=18.5, transfer=0.6).")
    counts = list(microbatches) if isinstance(microbatches, Sequence) else [microbatches]
    if not counts:
        raise PlanError("microbatches is an empty list: give a number, or the numbers that are allowed.")
    for count in counts:
        check_positive(microbatches=count)
    chunks = _chunks(ranks, costs, chunks)
    shapes = ("loop", "v") if placement == "any" else (placement,)
    return [
        Arrangement(shape, number, getattr(Placement, shape)(ranks, number), count, _scaled(costs, counts[0] / count))
        for count in dict.fromkeys(counts)
        for shape in shapes
        for number in (_CHUNKS[shape] if chunks is None else (chunks,))
        if shape == "loop" or number > 1 or placement == "v"
    ]


def _chunks(ranks: int, costs: Costs, chunks: int | None) -> int | None:
    """Return the number of chunks, if it is given, by itself or by costs that are given for each stage."""
    if chunks is not None:
        check_positive(chunks=chunks)
        return chunks
    for name in TIMES + MEMORY:
        value = getattr(costs, name)
        if isinstance(value, Sequence | Mapping):
            if len(value) == 0 or len(value) % ranks:
                raise PlanError(
                    f"{name} has {len(value)} values, for as many stages, which {ranks} ranks cannot share evenly: "
                    f"give one value for each stage, and {ranks}, {2 * ranks}, {3 * ranks}... stages."
                )
            return len(value) // ranks
    return None


def _scaled(costs: Costs, factor: float) -> Costs:
    """Return the costs of a microbatch that is `factor` times as large; the latency of a Link stays."""
    if factor == 1:
        return costs
    changes: dict[str, object] = {}
    for name in (*TIMES, *MEMORY, "transfer", "message_bytes"):
        value = getattr(costs, name)
        if isinstance(value, Mapping):
            changes[name] = {key: _times(each, factor) for key, each in value.items()}
        elif isinstance(value, Sequence):
            changes[name] = [each * factor for each in value]
        elif value is not None:
            changes[name] = _times(value, factor)
    return replace(costs, **changes)  # type: ignore[arg-type]  # the fields have several types


def _times(value: float | Link, factor: float) -> float | Link:
    return value if isinstance(value, Link) else value * factor
