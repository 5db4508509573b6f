"""A time that no plan can beat, from the work of each rank, the way of a microbatch through it, and its memory.

Memory makes a rank wait at two moments, whatever the order. Until its first gradient is back a rank can do nothing but
forwards, and only as many as it may hold. And after its last forward it can do no more than the backwards of what it
then holds until the gradient of that last microbatch is back.
"""

from __future__ import annotations

import math
from itertools import accumulate

from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem


def lower_bound(problem: Problem, objective: str) -> float:
    """Return a time that no plan can beat, whatever its order: its longest span, or its makespan.

    From the first pass of a rank r, a rank q below it cannot start before a microbatch has arrived there. q then has
    all its forwards and input gradients to do before the last gradient returns to r, which ends with a weight gradient,
    and those weight gradients that it may not hold back until then.
    And every rank computes at least its work and waits where its memory makes it wait, in a makespan after its first
    microbatch has arrived.
    """
    ways = _Ways(problem)
    # The first stage of rank r is stage r in each placement here, so that a way down leads along these.
    starts = [ways.down(0, rank) for rank in range(problem.ranks)]
    memory = [_MemoryWaits(problem, ways, rank) for rank in range(problem.ranks)]
    best = 0.0
    for rank in range(problem.ranks) if objective == "span" else (0,):
        for below in range(rank, problem.ranks):
            stages = problem.placement.stages_of[below]
            turn = problem.microbatches * sum(problem.time[FORWARD][stage] + ways.inputs[stage] for stage in stages)
            turn += memory[below].first + memory[below].weights
            through = max(turn, ways.round_trip(stages[0], stages[0]))
            there, back = starts[below] - starts[rank], ways.up(below, rank)
            best = max(best, there + through + back + ways.weights[rank])
    heads = starts if objective == "makespan" else [0.0] * problem.ranks
    works = [work + waits.total for work, waits in zip(problem.work, memory, strict=True)]
    return max(best, *(head + work for head, work in zip(heads, works, strict=True)))


class _Ways:
    """The least times between the passes of one microbatch."""

    def __init__(self, problem: Problem) -> None:
        time = problem.time
        every = range(problem.stages)
        self.forwards = time[FORWARD]
        self.inputs = [min(time[INPUT][stage], time[FULL][stage]) for stage in every]
        # What is left of a backward after its input gradient.
        self.weights = [
            min(time[FULL][stage], time[INPUT][stage] + time[WEIGHT][stage]) - self.inputs[stage] for stage in every
        ]
        self._down = list(accumulate((self.forwards[stage] + problem.down[stage] for stage in every), initial=0.0))
        self._up = list(accumulate((self.inputs[stage] + problem.up[stage] for stage in every), initial=0.0))
        self.last = problem.stages - 1

    def down(self, first: int, stage: int) -> float:
        """From the start of a stage's forward to the start of that of a later stage."""
        return self._down[stage] - self._down[first]

    def up(self, stage: int, first: int) -> float:
        """From the end of a stage's input gradient to the end of that of an earlier stage."""
        return self._up[stage + 1] - self._up[first + 1] - self.inputs[stage] + self.inputs[first]

    def round_trip(self, first: int, back: int) -> float:
        """From the start of a stage's forward to the end of the input gradient of a stage."""
        return (
            self.down(first, self.last) + self.forwards[self.last] + self.inputs[self.last] + self.up(self.last, back)
        )


class _MemoryWaits:
    """The time that a rank must wait because it may not hold more, and the work that it cannot put off.

    It waits `first` before its first gradient, and `last` after its last forward. `weights` is the time of the weight
    gradients that it must have done when its last input gradient ends.
    """

    def __init__(self, problem: Problem, ways: _Ways, rank: int) -> None:
        self.problem, self.stages, self.room = problem, problem.placement.stages_of[rank], problem.ceilings[rank]
        self.first = self.last = self.total = self.weights = 0.0
        grows = [problem.growth[FORWARD][stage] for stage in self.stages]
        kept = [grow + problem.growth[INPUT][stage] for grow, stage in zip(grows, self.stages, strict=True)]
        left = [keep + problem.growth[WEIGHT][stage] for keep, stage in zip(kept, self.stages, strict=True)]
        # Where a pass frees more than was taken, nothing follows from what is held.
        if math.isinf(self.room) or min(*grows, *kept) < 0 or min(left) < -1e-9 * max(*grows, 1e-300):
            return
        low, high = self.stages[0], self.stages[-1]
        forwards = [(ways.forwards[stage], grow) for stage, grow in zip(self.stages, grows, strict=True)]
        gradient = ways.round_trip(low, high) - ways.inputs[high]
        self.first = max(0.0, gradient - self._most(forwards))
        end = ways.round_trip(high, low) + ways.weights[low]
        self.last = max(0.0, end - ways.forwards[high] - self._most_after_forwards(grows, kept))
        weights = [(ways.weights[stage], keep) for stage, keep in zip(self.stages, kept, strict=True)]
        self.weights = max(0.0, problem.microbatches * sum(time for time, _ in weights) - self._most(weights))
        holds_all = problem.microbatches * sum(grows) <= self.room
        self.total = max(self.first, self.last) if holds_all else self.first + self.last

    def _most(self, kinds: list[tuple[float, float]]) -> float:
        """Return the most time of passes, each given with what it holds, whose sum the rank may hold."""
        held = {grow for _, grow in kinds}
        room = self.room
        if len(held) == 1 and min(held) > 0:
            room = room // min(held) * min(held)  # of equal parts a whole number fits
        total = 0.0
        for time, grow in sorted(kinds, key=lambda kind: -kind[0] / kind[1] if kind[1] > 0 else -math.inf):
            count = self.problem.microbatches if grow <= 0 else min(self.problem.microbatches, max(0.0, room) / grow)
            total += count * time
            room -= count * grow
        return total

    def _most_after_forwards(self, grows: list[float], kept: list[float]) -> float:
        """Return the most work that can be left when the rank begins its last forward."""
        time = self.problem.time
        whole = [max(time[FULL][stage], time[INPUT][stage] + time[WEIGHT][stage]) for stage in self.stages]
        halves = [time[WEIGHT][stage] for stage in self.stages]
        if len(self.stages) > 1 or grows[0] <= 0 or kept[0] <= 0:
            return self._most([*zip(whole, grows, strict=True), *zip(halves, kept, strict=True)])
        most, count = 0.0, self.problem.microbatches
        for held in range(1, min(count, int(self.room // grows[0])) + 1):
            waiting = min(count - held, int((self.room - held * grows[0]) // kept[0]))
            most = max(most, held * whole[0] + waiting * halves[0])
        return most
