"""The most memory that each rank needs under a schedule, for any cut: what the simulator finds, without running it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..schedule.action import Op
from ..schedule.plan import Plan
from ..split.balancing.problem import Array
from .stages import Stages, bounds_of

# How a computation changes the microbatches that a stage has in flight, and those between the halves of a backward.
CHANGES = {
    Op.FORWARD: (1, 0),
    Op.BACKWARD_INPUT: (-1, 1),
    Op.FULL_BACKWARD: (-1, 0),
    Op.BACKWARD_WEIGHT: (0, -1),
}


class RankMemory:
    """Knows how many microbatches the stages of each rank hold at any moment of a schedule."""

    def __init__(self, plan: Plan, stages: Stages) -> None:
        self.plan, self.stages = plan, stages
        self._moments = [_moments(plan, rank) for rank in range(plan.ranks)]

    def kept(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """The bytes of each rank that do not depend on how many microbatches are in flight."""
        each = [self.stages.memory(*bound) for bound in bounds_of(cuts, self.stages.blocks.count)]
        return tuple(
            sum(each[stage].kept for stage in held) + max(each[stage].passing for stage in held)
            for held in self.plan.placement.stages_of
        )

    def needs(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """The bytes that each rank needs at the most."""
        bounds = bounds_of(cuts, self.stages.blocks.count)
        found = []
        for kept, moments, held in zip(self.kept(cuts), self._moments, self.plan.placement.stages_of, strict=True):
            sizes = [self.stages.memory(*bounds[stage]).saved for stage in held]
            if moments.shape[1] > len(held):
                sizes += [self.stages.pending(*bounds[stage]) for stage in held]
            found.append(kept + float((moments @ np.array(sizes)).max()))
        return tuple(found)


def _moments(plan: Plan, rank: int) -> Array:
    """How many microbatches each stage of a rank has in flight, and how many pending if any are, by moment.

    A forward adds at its start, a backward frees at its end; the parts of an overlap start together.
    """
    held = plan.placement.stages_of[rank]
    column = {stage: number for number, stage in enumerate(held)}
    now, seen = [0] * (2 * len(held)), set()
    for action in plan.actions[rank]:
        leaves = [leaf for leaf in (() if action is None else action.leaves) if leaf.op in CHANGES]
        for leaf in sorted(leaves, key=lambda leaf: CHANGES[leaf.op], reverse=True):  # what is freed is so at the end
            flying, pending = CHANGES[leaf.op]
            now[column[leaf.stage]] += flying
            now[column[leaf.stage] + len(held)] += pending
            if flying > 0 or pending > 0:
                seen.add(tuple(now))
    moments = np.array(sorted(seen), dtype=np.float64)
    return moments if moments[:, len(held) :].any() else moments[:, : len(held)]
