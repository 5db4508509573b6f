"""Cuts by what ranks really need: the leanest one, and faster ones that still fit.

The balance knows what adds up over blocks. Gradients that an operation's backward makes, activations that are computed
again and weight gradients that are put off follow from the whole stage: from the cuts of the balance, one cut or some
neighbours are moved at a time, as long as that makes it better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..split.balance import Ranks
from ..split.balancing.chunked import ChunkedCuts
from ..split.balancing.least_memory import leanest_cuts
from .choices import in_flight
from .rank_memory import RankMemory

Quality = list[float]
MOST_MOVES = 1000


def leanest_cut(memory: RankMemory, limits: Sequence[float], start: Sequence[int]) -> list[int]:
    """The cut whose ranks use the least part of their limits; only the proportions of the limits matter.

    So whatever fits some memory fits any more than that. `start` is a cut to begin with, beside the balance's.
    """
    rank_of, flying = list(memory.plan.placement.rank_of), in_flight(memory.plan)
    by_balance = leanest_cuts(memory.stages.blocks, Ranks.of(rank_of, None, limits, flying)).cuts

    def shares(cuts: Sequence[int]) -> Quality:
        return sorted((need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True)), reverse=True)

    count = memory.stages.blocks.count
    return min((_climbed(each, count, shares) for each in (by_balance, start)), key=shares)


def faster_cut(
    memory: RankMemory, limits: Sequence[float], speeds: Sequence[float] | None, start: Sequence[int]
) -> list[int]:
    """A cut that fits with shorter loads, from one that fits."""
    chunked = ChunkedCuts(memory.stages.blocks, Ranks.of(list(memory.plan.placement.rank_of), speeds))

    def loads(cuts: Sequence[int]) -> Quality:
        over = max(need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True))
        return [max(1.0, over), *sorted(chunked.loads(list(cuts)), reverse=True)]

    return _climbed(start, memory.stages.blocks.count, loads)


def _climbed(start: Sequence[int], count: int, quality: Callable[[Sequence[int]], Quality]) -> list[int]:
    """Make moves that make it better, until there is none or so many were tried."""
    best, least, tried = list(start), quality(start), 0
    improved = True
    while improved and tried < MOST_MOVES:
        improved = False
        for moved in _moves(best, count):
            tried += 1
            found = quality(moved)
            if _is_less(found, least):
                best, least, improved = moved, found, True
                break
    return best


def _is_less(one: Quality, other: Quality) -> bool:
    """By the first that differs by more than rounding."""
    for left, right in zip(one, other, strict=True):
        if abs(left - right) > 1e-9 * max(abs(left), abs(right)):
            return left < right
    return False


def _moves(cuts: Sequence[int], count: int) -> Iterator[list[int]]:
    """A cut, or some neighbours together, moved by 1, 2, 4... blocks."""
    for length in range(len(cuts)):
        for first in range(len(cuts) - length):
            last = first + length
            before = cuts[first - 1] if first else 0
            after = cuts[last + 1] if last + 1 < len(cuts) else count
            for step in _steps(before + 1 - cuts[first], after - 1 - cuts[last]):
                yield [*cuts[:first], *(cut + step for cut in cuts[first : last + 1]), *cuts[last + 1 :]]


def _steps(low: int, high: int) -> Iterator[int]:
    """Powers of two of both signs, within bounds.

    >>> list(_steps(-3, 4))
    [-1, 1, -2, 2, 4]
    """
    size = 1
    while size <= max(-low, high):
        yield from (step for step in (-size, size) if low <= step <= high)
        size *= 2
