"""The forwards and input gradients of a plan in their order, with the weight gradients put where they cost least.

A weight gradient waits until its rank has nothing else to do, too many of them wait, or the next forward needs the
memory that it frees. With all of them done a rank holds no more than in the plan that it came from, so that its order
can be gone through within the same limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .greedy import NEVER, TOLERANCE, Draft
from .problem import FORWARD, INPUT, WEIGHT, Row
from .timing import Clock


@dataclass(frozen=True)
class Putting:
    """When weight gradients run, by rank."""

    patience: tuple[float, ...]  # the part of one by which it may keep the next pass waiting
    delay: tuple[int, ...]  # how many may wait


def refitted(clock: Clock, rows: Sequence[Row], putting: Putting) -> Draft:
    """The rows with their weight gradients put anew; full backwards stay as they are."""
    return _Refitting(clock, rows, putting).run()


class _Refitting:
    """The state of all ranks at one moment."""

    def __init__(self, clock: Clock, rows: Sequence[Row], putting: Putting) -> None:
        self.clock, self.problem, self.putting = clock, clock.problem, putting
        self.block = self.problem.stages * self.problem.microbatches
        weights = range(WEIGHT * self.block, (WEIGHT + 1) * self.block)
        self.left = [[number for number in reversed(row) if number not in weights] for row in rows]
        self.waiting: list[deque[int]] = [deque() for _ in rows]
        self.rows: tuple[Row, ...] = tuple([] for _ in rows)
        self.done = [-1.0] * (clock.nothing + 2)
        self.done[clock.nothing] = 0.0
        self.held = [0.0] * len(rows)
        self.limits = [limit + TOLERANCE * abs(limit) for limit in self.problem.limits]
        self.free = [0.0] * len(rows)
        self.events: list[tuple[float, int]] = []

    def run(self) -> Draft:
        """Let every rank decide whenever it is free or something arrives."""
        events, free = self.events, self.free
        for rank in range(len(free)):
            heappush(events, (0.0, rank))
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                self._decide(rank, now)
        # A rank that waited for a pass may have it earlier in this order than it was waited for.
        timing = self.clock.times(self.rows)
        assert timing is not None  # the order has just been gone through
        return Draft(self.rows, timing)

    def _decide(self, rank: int, now: float) -> None:
        left, waiting = self.left[rank], self.waiting[rank]
        arrival = NEVER
        if left:
            arrival = self.done[self.clock.needs[left[-1]]]
            if arrival < 0:
                arrival = NEVER
            elif arrival <= now and self._fits(rank, left[-1]) and len(waiting) <= self.putting.delay[rank]:
                self._run(rank, left.pop(), now)
                return
        if waiting:
            spare = self.clock.lasts[waiting[0]] * (1 - self.putting.patience[rank])
            if arrival <= now or arrival == NEVER or now + spare <= arrival or len(waiting) > self.putting.delay[rank]:
                self._run(rank, waiting.popleft(), now)

    def _fits(self, rank: int, number: int) -> bool:
        growth = self.clock.growth[number]
        return growth <= 0 or not self.waiting[rank] or self.held[rank] + growth <= self.limits[rank]

    def _run(self, rank: int, number: int, now: float) -> None:
        kind, rest = divmod(number, self.block)
        end = now + self.clock.lasts[number]
        self.rows[rank].append(number)
        self.held[rank] += self.clock.growth[number]
        self.free[rank] = end
        heappush(self.events, (end, rank))
        if kind == WEIGHT:
            return
        arrival = end + self.clock.travels[number]
        self.done[self.clock.fills[number]] = arrival
        if kind == INPUT:
            self.waiting[rank].append(WEIGHT * self.block + rest)
        stage = rest // self.problem.microbatches + (1 if kind == FORWARD else -1)
        if 0 <= stage < self.problem.stages:
            heappush(self.events, (arrival, self.problem.placement.rank_of[stage]))
