"""When the ranks of numbered rows start and end, and what they hold: the simulator without its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem


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
        self.lasts = [one for kind in time for one in kind for _ in each]  # by the number of a pass
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
        lasts, needs, fills, travels = self.lasts, self.needs, self.fills, self.travels
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
                    now += lasts[number]
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
