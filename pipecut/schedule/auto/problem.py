"""What is to be scheduled, as plain lists: times, travel and memory by stage, limits by rank.

A pass is one number, (kind * stages + stage) * microbatches + microbatch, so that the search works on lists of whole
numbers and makes actions only of the plan that it gives back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..action import Action, Op
from ..costs import Costs
from ..placement import Placement
from ..plan import Plan
from ..rules import Dataflow
from .limits import ceiling

Row = list[int]
KINDS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD)
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
        """How many passes there are if every backward is in two."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def ceilings(self) -> tuple[float, ...]:
        """By rank: what counts as within its limit."""
        return tuple(map(ceiling, self.limits))

    def has_all_passes(self, rows: Iterable[Row]) -> bool:
        """Whether nothing is missing in rows without repetitions. A full backward stands for both halves."""
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
        """The numbers of a rank's actions; what overlaps stands one after the other."""
        number_of = {op: kind for kind, op in enumerate(KINDS)}
        return [
            (number_of[leaf.op] * self.stages + leaf.stage) * self.microbatches + (leaf.microbatch or 0)
            for action in actions
            if action is not None
            for leaf in action.leaves
        ]

    def plan_of(self, name: str, rows: Sequence[Sequence[int]]) -> Plan:
        """The plan of numbered rows."""
        made = [
            Action(stage, op, microbatch)
            for op in KINDS
            for stage in range(self.stages)
            for microbatch in range(self.microbatches)
        ]
        actions = tuple(tuple(made[number] for number in row) for row in rows)
        return Plan(name, self.placement, self.microbatches, actions, Dataflow.chain(self.stages))


def problem_for(placement: Placement, microbatches: int, costs: Costs, limits: Sequence[float]) -> Problem:
    """The problem of a placement, whose costs are looked up once."""
    empty = Plan(
        "auto", placement, microbatches, ((),) * placement.ranks, Dataflow.chain(placement.stages)
    )  # only its stages count
    table = costs.table(empty)
    last = placement.stages - 1
    return Problem(
        placement=placement,
        microbatches=microbatches,
        time=tuple(table.time[op] for op in KINDS),
        growth=tuple(table.memory[op] for op in KINDS),
        down=tuple(_travel(placement, costs, Op.SEND_F, stage, min(stage + 1, last)) for stage in range(last + 1)),
        up=tuple(_travel(placement, costs, Op.SEND_B, stage, max(stage - 1, 0)) for stage in range(last + 1)),
        limits=tuple(limits),
        costs=costs,
    )


def _travel(placement: Placement, costs: Costs, send: Op, stage: int, other: int) -> float:
    if placement.rank_of[stage] == placement.rank_of[other]:
        return 0.0
    return costs.message_time(placement, send, stage, other)
