"""The cut that needs the least memory: the greatest share that a rank uses of its limit is as small as can be.

With one stage a rank it is exact. With several it is exact if the search ends within its budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .chunked import ChunkedCuts
from .problem import Blocks, Ranks, one_rank_per_stage
from .reach import Reach

_MOST_NODES = 20_000
_CLOSE = 1e-6


@dataclass(frozen=True)
class LeastMemory:
    """Cuts, the memory of each rank, as a share of its limit too, and whether no cut has a smaller share."""

    cuts: list[int]
    memory: tuple[float, ...]
    share: float
    certain: bool


def least_memory_cuts(blocks: Blocks, ranks: Ranks) -> LeastMemory:
    """Return the cuts, whatever time they take; only the proportions of the limits matter."""
    chunked = ChunkedCuts(blocks, ranks)
    if ranks.one_stage_each:
        cuts, certain = _bisected(blocks, ranks, chunked), True
    else:
        cuts, certain = _searched(blocks, ranks, chunked)
    return LeastMemory(cuts, tuple(chunked.memory(cuts)), chunked.share(cuts), certain)


def _bisected(blocks: Blocks, ranks: Ranks, chunked: ChunkedCuts) -> list[int]:
    """Halve the range of the share; what is found is the share of a cut that exists."""
    cuts = [round(blocks.count * stage / ranks.stages) for stage in range(1, ranks.stages)]
    low, high = 0.0, chunked.share(cuts)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        reach = Reach(blocks, ranks.with_memory(middle))
        reached = reach.within(math.inf)
        if reached is None:
            low = middle
            continue
        found = reach.path(reached, math.inf)
        share = chunked.share(found)
        if share < high:
            cuts, high = found, share
        else:  # the same but for rounding
            low = middle
    return cuts


def _searched(blocks: Blocks, ranks: Ranks, chunked: ChunkedCuts) -> tuple[list[int], bool]:
    """Improve stages that need little memory each by itself, one cut at a time, and then search all cuts in order."""
    each = one_rank_per_stage(ranks)
    start = _bisected(blocks, each, ChunkedCuts(blocks, each))
    share = chunked.share(start)
    if share > 0:
        # With so little memory that every rank has too little, the least excess is the least share.
        starved = ChunkedCuts(blocks, ranks.with_memory(_CLOSE * share))
        start = min(start, starved.improved(start), key=chunked.share)
    search = _Search(chunked, start)
    finished = search.extend([0], [0.0] * ranks.ranks)
    return search.best, finished


class _Search:
    """A depth-first search over the ends of the stages."""

    def __init__(self, chunked: ChunkedCuts, best: list[int]) -> None:
        self.chunked, self.blocks, self.ranks = chunked, chunked.blocks, chunked.ranks
        self.best, self.share = best, chunked.share(best)
        self.nodes = 0
        # What the rest of the chain needs at the least, wherever it is cut.
        fewest = [min(self.ranks.in_flight[stage:]) for stage in range(self.ranks.stages)]
        kept, saved = (sums[-1] - sums for sums in (self.blocks.kept_before, self.blocks.saved_before))
        self.rest = [np.asarray(kept + number * saved) for number in [*fewest[1:], 0.0]]

    def extend(self, bounds: list[int], needs: list[float]) -> bool:
        """Try all ends of the next stage; whether all was looked at."""
        stage, begin = len(bounds) - 1, bounds[-1]
        rank, last = self.ranks.rank_of[stage], stage == self.ranks.stages - 1
        furthest = self.blocks.count - (self.ranks.stages - 1 - stage)
        for end in (self.blocks.count,) if last else range(begin + 1, furthest + 1):
            self.nodes += 1
            if self.nodes > _MOST_NODES:
                return False
            grown = [*needs]
            grown[rank] += self.chunked.stage_memory(stage, begin, end)
            if grown[rank] / self.ranks.memory[rank] >= self.share * (1 - 1e-12):
                break  # a longer stage only needs more
            if last:
                self.best, self.share = bounds[1:], self.chunked.share(bounds[1:])
            elif self._has_room(stage, end, grown) and not self.extend([*bounds, end], grown):
                return False
        return True

    def _has_room(self, stage: int, end: int, needs: list[float]) -> bool:
        room = sum(self.share * limit - need for need, limit in zip(needs, self.ranks.memory, strict=True))
        return bool(self.rest[stage][end] <= room)
