"""Times and memory of numbered rows: the simulator without its records. The budget of a search."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
