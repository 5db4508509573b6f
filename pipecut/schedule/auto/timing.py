"""Times and memory of numbered rows: the simulator without its records. The budget of a search, and a lower bound."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem, Row


class Timing(NamedTuple):
    """The first start and the last end of each rank."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    def times(self, objective: str) -> list[float]:
        """Return the time of every rank that counts for an objective."""
        if objective == "makespan":
            return list(self.ends)
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]

    @property
    def span(self) -> float:
        """The longest time between a rank's first start and its last end."""
        return max(self.times("span"))

    @property
    def makespan(self) -> float:
        """The last end."""
        return max(self.ends)


class Clock:
    """A clock for the rows of one problem, used again and again."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        each = range(problem.microbatches)
        time, last = problem.time, problem.stages - 1
        self.durations = [one for kind in time for one in kind for _ in each]  # by the number of a pass
        self.growth = [one for kind in problem.growth for one in kind for _ in each]
        # The value that a pass waits for, as an index of `done`, and the time until its own can be used elsewhere. F
        # fills its own number, I and B fill that of I. A W needs nothing but its rank, in an order with it after its I.
        count = (last + 1) * problem.microbatches
        self.nothing = 2 * count
        self.needs: list[int] = []
        self.fills: list[int] = []
        self.travels: list[float] = []
        for kind in range(4):
            for stage in range(last + 1):
                for microbatch in each:
                    self.needs.append(self._need(kind, stage, microbatch))
                    index = (INPUT if kind == FULL else kind) * count + stage * problem.microbatches + microbatch
                    self.fills.append(self.nothing + 1 if kind == WEIGHT else index)
                    self.travels.append((problem.down, problem.up, problem.up, problem.up)[kind][stage])

    def _need(self, kind: int, stage: int, microbatch: int) -> int:
        problem = self.problem
        if kind == WEIGHT or (kind == FORWARD and stage == 0):
            return self.nothing
        if kind == FORWARD:
            return (stage - 1) * problem.microbatches + microbatch
        if stage == problem.stages - 1:
            return stage * problem.microbatches + microbatch  # its own forward: on this rank, and travel 0
        return (problem.stages + stage + 1) * problem.microbatches + microbatch

    def times(self, rows: Sequence[Sequence[int]], starts_of: list[float] | None = None) -> Timing | None:
        """Return the timing; None if the ranks wait for each other. `starts_of` gets the start of every pass."""
        durations, needs, fills, travels = self.durations, self.needs, self.fills, self.travels
        done = [-1.0] * (self.nothing + 2)
        done[self.nothing] = 0.0
        places, free, firsts = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
        live = list(range(len(rows)))
        while live:
            moved = False
            for rank in live:
                row, place, now = rows[rank], places[rank], free[rank]
                came_from = place
                for place in range(came_from, len(row)):
                    number = row[place]
                    arrival = done[needs[number]]
                    if arrival < 0:
                        break
                    if arrival > now:
                        now = arrival
                    if place == 0:
                        firsts[rank] = now
                    if starts_of is not None:
                        starts_of[number] = now
                    now += durations[number]
                    done[fills[number]] = now + travels[number]
                else:
                    place = len(row)
                moved = moved or place > came_from
                places[rank], free[rank] = place, now
            if not moved:
                return None
            live = [rank for rank in live if places[rank] < len(rows[rank])]
        return Timing(tuple(firsts), tuple(free))

    def peaks(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the most that each rank holds."""
        return [self.peak(row) for row in rows]

    def fits(self, rank: int, row: Sequence[int]) -> bool:
        """Return True if a rank keeps to its limit."""
        return self.peak(row) <= self.problem.ceilings[rank]

    def peak(self, row: Sequence[int]) -> float:
        """Return the most that a rank holds: a pass adds at its start and frees at its end."""
        growth = self.growth
        held = most = 0.0
        for number in row:
            held += growth[number]
            if held > most:
                most = held
        return most


Place = tuple[int, int]  # rank and index in its row


def critical_places(clock: Clock, rows: Sequence[Row], starts: Sequence[float], rank: int) -> list[Place]:
    """Return the passes on the critical path of a rank that start when the pass before them in their row ends."""
    where = {number: (each, place) for each, row in enumerate(rows) for place, number in enumerate(row)}
    found = []
    at: Place | None = (rank, len(rows[rank]) - 1)
    while at is not None:
        row, place = rows[at[0]], at[1]
        number = row[place]
        before = row[place - 1] if place else None
        if before is not None and starts[number] - starts[before] - clock.durations[before] <= 1e-9 * starts[number]:
            found.append(at)
            at = (at[0], place - 1)
        else:
            at = _maker(clock, number, where)
    return found


def _maker(clock: Clock, number: int, where: dict[int, Place]) -> Place | None:
    """Return the place of the pass for whose message a pass waited; None for an input of the model."""
    index = clock.needs[number]
    if index == clock.nothing:
        return None
    block = (
        clock.nothing // 2
    )  # indices of forwards, then of input gradients, numbered as F and I are; B fills those of I
    return where[index] if index < block or index in where else where[index + 2 * block]


_PLACED_PER_SECOND = 200_000  # passes that greedy scheduling places in a second
_TIMED_PER_SECOND = 2_000_000  # passes of given rows that are timed in a second
_COUNTED_PART = 0.4  # the part of the given time that the counts may take
_CLOCKED_PART = 0.6  # the part after which nothing new is begun; the rest is for the proof and the report


class Budget:
    """The budget of a search: so many passes placed or timed, and never longer than the clock allows.

    The clock is that of the searching thread, so that other work on the machine changes nothing. The count follows from
    the given time and a modest speed of a machine, so that on most machines it is the count that ends a search, and the
    result is the same every time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.thread_time() + _CLOCKED_PART * seconds
        self.ended_by_clock = False

    def greedy_runs(self, passes: int, part: float) -> int:
        """Return the number of greedy runs of so many passes within a part of the budget."""
        return int(_COUNTED_PART * part * self.seconds * _PLACED_PER_SECOND / passes)

    def timings(self, passes: int, part: float) -> int:
        """Return the number of timings of so many passes within a part of the budget."""
        return int(_COUNTED_PART * part * self.seconds * _TIMED_PER_SECOND / passes)

    def is_over(self) -> bool:
        """Return True if the clock ends the search."""
        self.ended_by_clock = self.ended_by_clock or time.thread_time() > self.deadline
        return self.ended_by_clock


# A time that no plan can beat, from the work of each rank, the way of a microbatch through it, and its memory.
#
# Memory makes a rank wait at two moments, whatever the order. Until its first gradient is back a rank can do nothing
# but forwards, and only as many as it may hold. And after its last forward it can do no more than the backwards of what
# it then holds until the gradient of that last microbatch is back.


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
        kinds = problem.time
        every = range(problem.stages)
        self.forwards = kinds[FORWARD]
        self.inputs = [min(kinds[INPUT][stage], kinds[FULL][stage]) for stage in every]
        # What is left of a backward after its input gradient.
        self.weights = [
            min(kinds[FULL][stage], kinds[INPUT][stage] + kinds[WEIGHT][stage]) - self.inputs[stage] for stage in every
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
        # The last backward may be a whole one, which never holds what its weight gradient would wait with.
        whole = max((each for (each, keep), grow in zip(weights, grows, strict=True) if keep > grow), default=0.0)
        put_off = self._most(weights) + whole
        self.weights = max(0.0, problem.microbatches * sum(each for each, _ in weights) - put_off)
        holds_all = problem.microbatches * sum(grows) <= self.room
        self.total = max(self.first, self.last) if holds_all else self.first + self.last

    def _most(self, kinds: list[tuple[float, float]]) -> float:
        """Return the most time of passes, each given with what it holds, whose sum the rank may hold."""
        held = {grow for _, grow in kinds}
        room = self.room
        if len(held) == 1 and min(held) > 0:
            room = room // min(held) * min(held)  # of equal parts a whole number fits
        total = 0.0
        for each, grow in sorted(kinds, key=lambda kind: -kind[0] / kind[1] if kind[1] > 0 else -math.inf):
            count = self.problem.microbatches if grow <= 0 else min(self.problem.microbatches, max(0.0, room) / grow)
            total += count * each
            room -= count * grow
        return total

    def _most_after_forwards(self, grows: list[float], kept: list[float]) -> float:
        """Return the most work that can be left when the rank begins its last forward."""
        kinds = self.problem.time
        whole = [max(kinds[FULL][stage], kinds[INPUT][stage] + kinds[WEIGHT][stage]) for stage in self.stages]
        halves = [kinds[WEIGHT][stage] for stage in self.stages]
        if len(self.stages) > 1 or grows[0] <= 0 or kept[0] <= 0:
            return self._most([*zip(whole, grows, strict=True), *zip(halves, kept, strict=True)])
        most, count = 0.0, self.problem.microbatches
        for held in range(1, min(count, int(self.room // grows[0])) + 1):
            waiting = min(count - held, int((self.room - held * grows[0]) // kept[0]))
            most = max(most, held * whole[0] + waiting * halves[0])
        return most
