"""Peak memory of each rank under a schedule, for any cut, as the simulator would find it; and cuts that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..schedule import Op, Plan
from ..split import Array, CutCosts, Ranks, least_memory_cuts
from .choices import in_flight
from .costs import StageCosts, bounds_of

# Changes by a computation of a stage's microbatches in flight, and of those between the halves of a backward.
_CHANGES = {
    Op.FORWARD: (1, 0),
    Op.BACKWARD_INPUT: (-1, 1),
    Op.FULL_BACKWARD: (-1, 0),
    Op.BACKWARD_WEIGHT: (0, -1),
}


class RankMemory:
    """Memory of each rank, from the microbatches that its stages hold at any moment of a schedule."""

    def __init__(self, plan: Plan, stages: StageCosts) -> None:
        self.plan, self.stages = plan, stages
        self._moments = [_moments(plan, rank) for rank in range(plan.ranks)]

    def constant(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """Return the bytes of each rank that do not depend on the microbatches in flight."""
        each = [self.stages.memory(*bound) for bound in bounds_of(cuts, self.stages.blocks.count)]
        return tuple(
            sum(each[stage].constant for stage in held) + max(each[stage].transient for stage in held)
            for held in self.plan.placement.stages_of
        )

    def needs(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """Return the peak bytes of each rank."""
        bounds = bounds_of(cuts, self.stages.blocks.count)
        found = []
        for constant, moments, held in zip(
            self.constant(cuts), self._moments, self.plan.placement.stages_of, strict=True
        ):
            sizes = [self.stages.memory(*bounds[stage]).saved for stage in held]
            if moments.shape[1] > len(held):
                sizes += [self.stages.pending(*bounds[stage]) for stage in held]
            found.append(constant + float((moments @ np.array(sizes)).max()))
        return tuple(found)


def _moments(plan: Plan, rank: int) -> Array:
    """Return the microbatches in flight in each stage of a rank, and the pending ones if there are any, by moment.

    A forward adds at its start, a backward frees at its end; the parts of an overlap start together.
    """
    held = plan.placement.stages_of[rank]
    column = {stage: number for number, stage in enumerate(held)}
    now, seen = [0] * (2 * len(held)), set()
    for action in plan.actions[rank]:
        leaves = [leaf for leaf in (() if action is None else action.leaves) if leaf.op in _CHANGES]
        for leaf in sorted(leaves, key=lambda leaf: _CHANGES[leaf.op], reverse=True):  # freed at the end
            flying, pending = _CHANGES[leaf.op]
            now[column[leaf.stage]] += flying
            now[column[leaf.stage] + len(held)] += pending
            if flying > 0 or pending > 0:
                seen.add(tuple(now))
    moments = np.array(sorted(seen), dtype=np.float64)
    return moments if moments[:, len(held) :].any() else moments[:, : len(held)]


# Cuts by the memory of ranks.
#
# The balance knows costs that add up over blocks. Gradients that an operation's backward makes, recomputed activations
# and deferred weight gradients depend on the whole stage. So from the cuts of the balance, one cut or some neighbours
# are moved at a time, as long as that makes it better.

_Quality = list[float]
_MAX_MOVES = 1000


def least_memory_cut(memory: RankMemory, limits: Sequence[float], start: Sequence[int]) -> list[int]:
    """Return the cut whose ranks use the least part of their limits; only the proportions of the limits matter.

    So a choice that fits some memory fits any larger one. `start` is a cut to begin with, beside the balance's.
    """
    rank_of, flying = list(memory.plan.placement.rank_of), in_flight(memory.plan)
    by_balance = least_memory_cuts(memory.stages.blocks, Ranks.of(rank_of, None, limits, flying)).cuts

    def shares(cuts: Sequence[int]) -> _Quality:
        return sorted((need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True)), reverse=True)

    count = memory.stages.blocks.count
    return min((_hill_climb(each, count, shares) for each in (by_balance, start)), key=shares)


def faster_cut(
    memory: RankMemory, limits: Sequence[float], speeds: Sequence[float] | None, start: Sequence[int]
) -> list[int]:
    """Return a cut with shorter loads that fits, from one that fits."""
    costs = CutCosts(memory.stages.blocks, Ranks.of(list(memory.plan.placement.rank_of), speeds))

    def loads(cuts: Sequence[int]) -> _Quality:
        over = max(need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True))
        return [max(1.0, over), *sorted(costs.loads(list(cuts)), reverse=True)]

    return _hill_climb(start, memory.stages.blocks.count, loads)


def _hill_climb(start: Sequence[int], count: int, quality: Callable[[Sequence[int]], _Quality]) -> list[int]:
    """Make moves that improve the quality, until there is none or _MAX_MOVES were tried."""
    best, least, tried = list(start), quality(start), 0
    improved = True
    while improved and tried < _MAX_MOVES:
        improved = False
        for moved in _moves(best, count):
            tried += 1
            found = quality(moved)
            if _is_less(found, least):
                best, least, improved = moved, found, True
                break
    return best


def _is_less(one: _Quality, other: _Quality) -> bool:
    """Compare by the first number that differs by more than rounding."""
    for left, right in zip(one, other, strict=True):
        if abs(left - right) > 1e-9 * max(abs(left), abs(right)):
            return left < right
    return False


def _moves(cuts: Sequence[int], count: int) -> Iterator[list[int]]:
    """Yield cuts of which one, or some neighbours together, are moved by 1, 2, 4... blocks."""
    for length in range(len(cuts)):
        for first in range(len(cuts) - length):
            last = first + length
            before = cuts[first - 1] if first else 0
            after = cuts[last + 1] if last + 1 < len(cuts) else count
            for step in _steps(before + 1 - cuts[first], after - 1 - cuts[last]):
                yield [*cuts[:first], *(cut + step for cut in cuts[first : last + 1]), *cuts[last + 1 :]]


def _steps(low: int, high: int) -> Iterator[int]:
    """Yield powers of two of both signs, within bounds.

    >>> list(_steps(-3, 4))
    [-1, 1, -2, 2, 4]
    """
    size = 1
    while size <= max(-low, high):
        yield from (step for step in (-size, size) if low <= step <= high)
        size *= 2
