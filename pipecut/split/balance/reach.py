"""The exact min-max cut where every rank has one stage: which bounds can be reached within a limit.

A stage from bound i to bound j takes (work[j] - work[i]) / speed + crossing[i] + crossing[j]. That is within the limit
where

    work[i] / speed - crossing[i]  >=  work[j] / speed + crossing[j] - limit

so that the greatest left side, among the bounds that the stages before can reach and that memory allows, decides for
each j: one pass over the chain for each stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .chunked import ChunkedCuts
from .problem import Array, Blocks, Memory, Positions, Ranks, one_rank_per_stage

Reached = list[npt.NDArray[np.bool_]]

# Sums of many small numbers are not exact.
_ROUNDING = 1e-12


class Reach:
    """Bounds that stages can end at. Stage s runs on rank `rank_of[s]`."""

    def __init__(self, blocks: Blocks, ranks: Ranks) -> None:
        self.blocks, self.ranks = blocks, ranks
        self.speeds = [ranks.speeds[rank] for rank in ranks.rank_of]
        needs = {number: Memory(blocks, number) for number in set(ranks.in_flight)}
        windows: dict[tuple[float, float], Positions] = {}
        for rank, number in zip(ranks.rank_of, ranks.in_flight, strict=True):
            key = (ranks.memory[rank], number)
            if key not in windows:
                windows[key] = needs[number].earliest(key[0])
        self.earliest = [
            windows[ranks.memory[rank], number] for rank, number in zip(ranks.rank_of, ranks.in_flight, strict=True)
        ]
        self._rounding = _ROUNDING * max(1e-300, float(blocks.work[-1]))
        least = {id(window): self._least_too_large(window) for window in windows.values()}
        self._too_large = [least[id(window)] for window in self.earliest]
        self._no_window = np.zeros(blocks.count + 1, dtype=np.int64)

    def _least_too_large(self, earliest: Positions) -> float:
        """Return the least work of a run that memory does not allow."""
        ends = np.flatnonzero(earliest)
        return float((self.blocks.work[ends] - self.blocks.work[earliest[ends] - 1]).min(initial=math.inf))

    def within(self, limit: float) -> Reached | None:
        """Return the bounds reachable after 0, 1, 2... stages, or None if the end of the chain is not."""
        count, crossing = self.blocks.count, self.blocks.crossing
        reached = np.zeros(count + 1, dtype=np.bool_)
        reached[0] = True
        passed = [reached]
        for stage, speed in enumerate(self.speeds):
            scaled = self.blocks.work / speed
            # What is too large for the memory may be too long anyway: then there is no need to look at windows.
            by_time = self._too_large[stage] > (limit + self._rounding) * speed + self._rounding
            earliest = self._no_window if by_time else self.earliest[stage]
            best = _greatest_before(np.where(reached, scaled - crossing, -math.inf), earliest)
            reached = (best > -math.inf) & (best >= scaled + crossing - limit - self._rounding / speed)
            reached[0] = False
            if not reached.any():
                return None
            passed.append(reached)
        return passed if reached[count] else None

    def fits(self, stage: int, begins: Positions, end: int, limit: float) -> npt.NDArray[np.bool_]:
        """Tell which of some begins make a stage that ends here and is within the limit."""
        load = self.load(stage, begins, end)
        allowed = (begins < end) & (begins >= self.earliest[stage][end])
        fine: npt.NDArray[np.bool_] = allowed & (load <= limit + self._rounding / self.speeds[stage])
        return fine

    def begins_of(self, stage: int, ends: Positions, limit: float) -> npt.NDArray[np.bool_]:
        """Mark every bound from which a stage to one of the ends is within the limit."""
        count, crossing = self.blocks.count, self.blocks.crossing
        scaled = self.blocks.work / self.speeds[stage]
        values = np.full(count + 1, -math.inf)
        values[ends] = -(scaled[ends] + crossing[ends])
        latest = np.searchsorted(self.earliest[stage], np.arange(count + 1), side="right") - 1
        best = _greatest_before(values[::-1], (count - latest)[::-1])[::-1]
        fine: npt.NDArray[np.bool_] = -best <= limit + scaled - crossing + self._rounding / self.speeds[stage]
        return fine & (best > -math.inf)

    def load(self, stage: int, begins: Positions, end: int) -> Array:
        """Return the time of a stage that ends here, for each of some begins."""
        work, crossing = self.blocks.work, self.blocks.crossing
        loads: Array = (work[end] - work[begins]) / self.speeds[stage] + crossing[begins] + crossing[end]
        return loads

    def path(self, reached: Reached, limit: float) -> list[int]:
        """Return some cuts within the limit, found from the end back."""
        end, cuts = self.blocks.count, []
        for stage in range(self.ranks.stages - 1, 0, -1):
            begins = np.flatnonzero(reached[stage][:end])
            end = int(begins[self.fits(stage, begins, end, limit)][-1])
            cuts.append(end)
        return cuts[::-1]

    def bottleneck(self, cuts: list[int]) -> float:
        """Return the longest time of a stage."""
        bounds = [0, *cuts, self.blocks.count]
        return max(
            float(self.load(stage, np.array([bounds[stage]]), bounds[stage + 1])[0]) for stage in range(len(cuts) + 1)
        )

    def least(self) -> float | None:
        """Return the least bottleneck that any cut has; None if memory allows no cut."""
        reached = self.within(math.inf)
        if reached is None:
            return None
        # A cut that exists, and a time that no cut is below.
        found = self.bottleneck(self.path(reached, math.inf))
        low = float(self.blocks.work[-1]) / sum(self.speeds)
        while found - low > 1e-6 * found:
            middle = (low + found) / 2
            reached = self.within(middle)
            if reached is None:
                low = middle
            else:
                found = min(middle, self.bottleneck(self.path(reached, middle)))
        return self._tightened(found)

    def _tightened(self, found: float) -> float:
        """Go from a time near the least one down to it; each step is the time of a cut that exists."""
        while True:
            less = found * (1 - 1e-9)
            reached = self.within(less)
            shorter = found if reached is None else self.bottleneck(self.path(reached, less))
            if shorter >= found:
                return found
            found = shorter


def _greatest_before(values: Array, earliest: Positions) -> Array:
    """Return for each bound the greatest value from its earliest begin up to, not including, itself."""
    shifted = np.concatenate(([-math.inf], np.maximum.accumulate(values)[:-1]))
    if not earliest.any():
        return shifted
    places = np.arange(len(values))
    lengths = places - earliest
    best: Array = np.full(len(values), -math.inf)
    # Two runs of a power of two, one from each side, cover a window.
    level, power = values, 1
    while power <= lengths.max(initial=0):
        here = np.flatnonzero((lengths >= power) & (lengths < 2 * power))
        best[here] = np.maximum(level[earliest[here]], level[here - power])
        longer = level.copy()
        longer[: len(level) - power] = np.maximum(level[: len(level) - power], level[power:])
        level, power = longer, 2 * power
    return best


# The cut that needs the least memory: the greatest share that a rank uses of its limit is as small as can be.
#
# With one stage per rank it is exact. With several it is exact if the search ends within its budget.


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
