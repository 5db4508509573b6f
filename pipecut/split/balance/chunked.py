"""Cuts where ranks have several stages: the load of a rank is the sum over its stages.

A search that is exact where it ends within its budget, from cuts found by shares and improved one cut at a time.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from .problem import Array, CutCosts

_MOST_NODES = 50_000
_MOST_ROUNDS = 200

# How far the memory of the ranks is exceeded, then the bottleneck, then a measure of the rest.
_Quality = tuple[float, float]


class ChunkedCuts(CutCosts):
    """Search for cuts of the least bottleneck over ranks."""

    def quality(self, cuts: list[int]) -> _Quality:
        """Return the share by which memory is exceeded, and the bottleneck: the less the better."""
        excess = self.share(cuts) - 1
        return (excess if excess > 1e-9 else 0.0, max(self.loads(cuts)))

    def find(self, starts: list[list[int]]) -> tuple[list[int], bool]:
        """Return the best cuts found, and whether it is certain that there are none better."""
        improved = [self.improved(start) for start in (self._by_shares(), *starts)]
        best = min(improved, key=self.quality)
        return self._searched(best)

    def _by_shares(self) -> list[int]:
        """Give each rank its part of the work by its speed, in equal stages."""
        held = [self.ranks.rank_of.count(rank) for rank in range(self.ranks.ranks)]
        shares = [self.ranks.speeds[rank] / held[rank] for rank in self.ranks.rank_of]
        total = float(self.blocks.work[-1]) / sum(shares)
        cuts: list[int] = []
        for stage, share in enumerate(itertools.accumulate(shares[:-1]), start=1):
            nearest = int(np.searchsorted(self.blocks.work, share * total))
            below = self.blocks.work[nearest] - share * total > share * total - self.blocks.work[max(nearest - 1, 0)]
            room = self.blocks.count - (self.ranks.stages - stage)
            cuts.append(min(max(nearest - bool(below), (cuts[-1] if cuts else 0) + 1), room))
        return cuts

    def improved(self, cuts: list[int]) -> list[int]:
        """Move one cut after the other to where the two ranks beside it are best off, until nothing changes."""
        cuts = list(cuts)
        for _ in range(_MOST_ROUNDS):
            before = list(cuts)
            for place in range(len(cuts)):
                cuts[place] = self._best_place(cuts, place)
            if cuts == before:
                break
        return cuts

    def _best_place(self, cuts: list[int], place: int) -> int:
        bounds = [0, *cuts, self.blocks.count]
        begin, end = bounds[place], bounds[place + 2]
        left, right = self.ranks.rank_of[place], self.ranks.rank_of[place + 1]
        options = np.arange(begin + 1, end)
        fixed = self._others(bounds, place)
        before = self.stage_time(place, np.array(begin), options)
        after = self.stage_time(place + 1, options, np.array(end))
        loads = {left: fixed[0][left] + before, right: fixed[0][right] + after}
        needs = {
            left: fixed[1][left] + self.memories[place].from_begin(begin, options),
            right: fixed[1][right] + self.memories[place + 1].to_end(options, end),
        }
        if left == right:
            loads = {left: fixed[0][left] + before + after}
            needs = {left: needs[left] + needs[right] - fixed[1][right]}
        longest: Array = np.maximum.reduce(list(loads.values()))
        limits = self.ranks.memory
        over: Array = np.maximum.reduce([np.maximum(needs[rank] / limits[rank] - 1, 0.0) for rank in needs])
        prices = np.array((0.0, *self.blocks.prices, 0.0))[options]
        order = np.lexsort((np.abs(options - cuts[place]), prices, longest, np.where(over > 1e-9, over, 0.0)))
        chosen, now = int(order[0]), cuts[place] - begin - 1
        # Only a gain is worth a move, or two cuts would chase each other.
        gains = (over[chosen], longest[chosen]) < (over[now] - 1e-12, longest[now] * (1 - 1e-12))
        gains = gains or (over[chosen] <= over[now] and longest[chosen] < longest[now] * (1 - 1e-12))
        gains = gains or (over[chosen], longest[chosen]) == (over[now], longest[now]) and prices[chosen] < prices[now]
        return int(options[chosen]) if gains else cuts[place]

    def _others(self, bounds: list[int], place: int) -> tuple[list[float], list[float]]:
        """Return time and memory of each rank without the two stages beside a cut."""
        loads, needs = [0.0] * self.ranks.ranks, [0.0] * self.ranks.ranks
        for stage, rank in enumerate(self.ranks.rank_of):
            if stage not in (place, place + 1):
                loads[rank] += float(self.stage_time(stage, np.array(bounds[stage]), np.array(bounds[stage + 1])))
                if self.ranks.limited:
                    needs[rank] += self.stage_memory(stage, bounds[stage], bounds[stage + 1])
        return loads, needs

    def _searched(self, best: list[int]) -> tuple[list[int], bool]:
        """Try all cuts in order, leaving out those that cannot become better; give up when the budget is spent."""
        goal = self.lower_bound() * (1 + 1e-12)
        state = _Search(self, best, goal)
        finished = state.run()
        return state.best, finished


class _Search:
    """A depth-first search over the ends of the stages."""

    def __init__(self, cuts: ChunkedCuts, best: list[int], goal: float) -> None:
        self.cuts, self.best, self.goal = cuts, best, goal
        self.blocks, self.ranks = cuts.blocks, cuts.ranks
        self.quality = cuts.quality(best)
        self.nodes = 0

    def run(self) -> bool:
        """Return True if the search was complete, or reached the goal, which is a lower bound."""
        if self.quality[0] == 0.0 and self.quality[1] <= self.goal:
            return True
        return self._extend([0], [0.0] * self.ranks.ranks, [0.0] * self.ranks.ranks)

    def _extend(self, bounds: list[int], loads: list[float], needs: list[float]) -> bool:
        stage = len(bounds) - 1
        rank, begin = self.ranks.rank_of[stage], bounds[-1]
        last = stage == self.ranks.stages - 1
        room = self.blocks.count - (self.ranks.stages - 1 - stage)
        for end in (self.blocks.count,) if last else range(begin + 1, room + 1):
            self.nodes += 1
            if self.nodes > _MOST_NODES:
                return False
            time = float(self.cuts.stage_time(stage, np.array(begin), np.array(end)))
            work = (self.blocks.work[end] - self.blocks.work[begin]) / self.ranks.speeds[rank]
            need = needs[rank] + (self.cuts.stage_memory(stage, begin, end) if self.ranks.limited else 0.0)
            if need > self.ranks.memory[rank] * (1 + 1e-9) or (
                self.quality[0] == 0.0 and loads[rank] + work >= self.quality[1]
            ):
                break  # a longer stage only needs more
            grown = [*loads]
            grown[rank] += time
            if not self._can_become_best(grown, end):
                continue
            if last:
                self.best, self.quality = bounds[1:], (0.0, max(grown))
                continue
            held = [*needs]
            held[rank] = need
            if not self._extend([*bounds, end], grown, held):
                return False
        return True

    def _can_become_best(self, loads: list[float], end: int) -> bool:
        limit = self.quality[1] if self.quality[0] == 0.0 else math.inf
        if max(loads) >= limit * (1 - 1e-12):
            return False
        if math.isinf(limit):
            return True
        room = sum((limit - load) * speed for load, speed in zip(loads, self.ranks.speeds, strict=True))
        return float(self.blocks.work[-1] - self.blocks.work[end]) <= room
