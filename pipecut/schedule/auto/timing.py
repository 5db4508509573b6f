"""When the ranks of numbered rows start and end, and what they hold: the simulator without its records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem, Row


class Timing(NamedTuple):
    """The first start and the last end of each rank."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def span(self) -> float:
        """The longest time between a rank's first start and its last end."""
        return max(end - start for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def makespan(self) -> float:
        """The last end."""
        return max(self.ends)


class Clock:
    """Times rows of one problem, again and again."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        each = range(problem.microbatches)
        time, last = problem.time, problem.stages - 1
        self.durations = [one for kind in time for one in kind for _ in each]  # by the number of a pass
        self.growth = [one for kind in problem.growth for one in kind for _ in each]
        # What a pass waits for, as a slot of `done`; and when what it makes can be used elsewhere. F fills its own
        # number, I and B fill that of I. A W needs nothing but its rank, in an order that has it after its I.
        count = (last + 1) * problem.microbatches
        self.nothing = 2 * count
        self.needs: list[int] = []
        self.fills: list[int] = []
        self.travels: list[float] = []
        for kind in range(4):
            for stage in range(last + 1):
                for microbatch in each:
                    self.needs.append(self._need(kind, stage, microbatch))
                    slot = (INPUT if kind == FULL else kind) * count + stage * problem.microbatches + microbatch
                    self.fills.append(self.nothing + 1 if kind == WEIGHT else slot)
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
        """The timing; None if the ranks wait for each other. `starts_of` takes the start of every pass, by number."""
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
        """The most that each rank holds."""
        return [self.peak(row) for row in rows]

    def fits(self, rank: int, row: Sequence[int]) -> bool:
        """Whether a rank keeps to its limit."""
        return self.peak(row) <= self.problem.ceilings[rank]

    def peak(self, row: Sequence[int]) -> float:
        """The most that a rank holds: a pass adds at its start and frees at its end."""
        growth = self.growth
        held = most = 0.0
        for number in row:
            held += growth[number]
            if held > most:
                most = held
        return most


# MERGED: What no plan can beat, whatever its order and its memory.


def lower_bound(problem: Problem, objective: str) -> float:
    """The least that the time of a plan can be: its longest span, or its makespan.

    From the first pass of a rank r, a rank q below it cannot start before a microbatch has come there. q then has all
    its forwards and input gradients to do before the last gradient goes back to r, which ends with a weight gradient.
    And every rank computes at least its work, in a makespan after its first microbatch has come.
    """
    time, last = problem.time, problem.stages - 1
    inputs = [min(time[INPUT][stage], time[FULL][stage]) for stage in range(last + 1)]
    both = [
        min(time[FULL][stage], time[INPUT][stage] + time[WEIGHT][stage]) - inputs[stage] for stage in range(last + 1)
    ]
    # The first stage of rank r is stage r in each placement here, so that a way down leads along these.
    way_down, way_up = [0.0], [0.0]
    for stage in range(problem.ranks - 1):
        way_down.append(way_down[-1] + time[FORWARD][stage] + problem.down[stage])
        way_up.append(way_up[-1] + problem.up[stage + 1] + inputs[stage])
    chain = _chains(problem, inputs)
    best = 0.0
    for rank in range(problem.ranks) if objective == "span" else (0,):
        for below in range(rank, problem.ranks):
            stages = problem.placement.stages_of[below]
            turn = problem.microbatches * sum(time[FORWARD][stage] + inputs[stage] for stage in stages)
            through = max(turn, chain[below])
            there, back = way_down[below] - way_down[rank], way_up[below] - way_up[rank]
            best = max(best, there + through + back + both[rank])
    heads = way_down if objective == "makespan" else [0.0] * problem.ranks
    return max(best, *(head + work for head, work in zip(heads, problem.work, strict=True)))


def _chains(problem: Problem, inputs: list[float]) -> list[float]:
    """By rank: one microbatch from its first stage's forward to that stage's input gradient, alone in the pipeline."""
    chains = [0.0] * problem.ranks
    way = 0.0
    for stage in reversed(range(problem.stages)):
        if stage < problem.stages - 1:
            way += problem.down[stage] + problem.up[stage + 1]
        way += problem.time[FORWARD][stage] + inputs[stage]
        if stage < problem.ranks:
            chains[stage] = way
    return chains


# MERGED: Which passes of timed rows keep a rank from ending sooner.


Place = tuple[int, int]  # rank and index in its row


def critical_places(clock: Clock, rows: Sequence[Row], starts: Sequence[float], rank: int) -> list[Place]:
    """The passes on the longest chain to the end of a rank that start when the pass before them in their row ends."""
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
    """Where the pass is for whose message a pass waited; None for what was there from the start."""
    slot = clock.needs[number]
    if slot == clock.nothing:
        return None
    block = (
        clock.nothing // 2
    )  # slots of forwards, then of input gradients, numbered as F and I are; B fills those of I
    return where[slot] if slot < block or slot in where else where[slot + 2 * block]


# MERGED: How much searching is done: so many passes placed or timed, and never longer than the clock allows.
# MERGED:
# MERGED: The clock is that of the searching thread, so that other work on the machine changes nothing. The count
# MERGED: follows from the
# MERGED: time that is given and from a modest speed of a machine, so that on most machines it is the count that
# MERGED: ends a search,
# MERGED: and the result is the same every time.


_PLACED_PER_SECOND = 200_000  # passes that are placed in a second by the rules
_TIMED_PER_SECOND = 2_000_000  # passes of given rows that are timed in a second
_COUNTED_PART = 0.4  # the part of the given time that the counts may take
_CLOCKED_PART = 0.6  # the part after which nothing new is begun; the rest is for the proof and the report


class Budget:
    """What is left of a search."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.thread_time() + _CLOCKED_PART * seconds
        self.ended_by_clock = False

    def greedy_runs(self, passes: int, part: float) -> int:
        """How many greedy_runs of so many passes may be made in a part of the budget."""
        return int(_COUNTED_PART * part * self.seconds * _PLACED_PER_SECOND / passes)

    def timings(self, passes: int, part: float) -> int:
        """How many rows of so many passes may be timed in a part of the budget."""
        return int(_COUNTED_PART * part * self.seconds * _TIMED_PER_SECOND / passes)

    def is_over(self) -> bool:
        """Whether the clock ends the search."""
        self.ended_by_clock = self.ended_by_clock or time.thread_time() > self.deadline
        return self.ended_by_clock
