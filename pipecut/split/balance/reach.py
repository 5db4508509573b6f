"""The exact min-max cut where every rank has one stage: which bounds can be reached within a limit.

A stage from bound i to bound j takes (work[j] - work[i]) / speed + crossing[i] + crossing[j]. That is within the limit
where

    work[i] / speed - crossing[i]  >=  work[j] / speed + crossing[j] - limit

so that the greatest left side, among the bounds that the stages before can reach and that memory allows, decides for
each j: one pass over the chain for each stage.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .problem import Array, Blocks, Memory, Positions, Ranks

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
