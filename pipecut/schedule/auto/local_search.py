"""Local search: move single passes to other places in their rank's order while that shortens the plan.

A change that makes the plan worse is kept if it is no worse than the plan was some changes before (late acceptance), so
that the search can leave a local optimum.
"""

from __future__ import annotations

from random import Random

from .candidate import Candidate, checked_candidate, merit
from .problem import FORWARD, FULL, INPUT, WEIGHT, Row
from .timing import Budget, Clock, Place, Timing, critical_places

_LATE = 30  # changes after which a plan must not be worse
_AHEAD = 40  # passes of a row among which one is looked for that could fill a gap


def local_search(
    clock: Clock, start: Candidate, objective: str, bound: float, budget: Budget, part: float, random: Random
) -> Candidate:
    """Return the best plan that single moves lead to."""
    return _LocalSearch(clock, start, objective, random).run(bound, budget, part)


class _LocalSearch:
    def __init__(self, clock: Clock, start: Candidate, objective: str, random: Random) -> None:
        self.clock, self.problem, self.objective, self.random = clock, clock.problem, objective, random
        self.rows: list[Row] = [list(row) for row in start.rows]
        self.best = start
        self.starts = [0.0] * len(self.clock.durations)
        self.critical: list[Place] | None = None  # of the rows as they are, once it is asked for
        self.block = self.problem.stages * self.problem.microbatches  # numbers of one kind

    def run(self, bound: float, budget: Budget, part: float) -> Candidate:
        """Move passes until the budget ends or the bound is reached."""
        timing = self.clock.times(self.rows, self.starts)
        assert timing is not None
        now = self._cost(timing)
        history = [now] * _LATE
        goal = bound * (1 + 1e-9)
        for number in range(budget.timings(self.problem.passes, part)):
            if budget.is_over() or self.best.merit(self.objective)[0] <= goal:
                break
            move = self._move(timing)
            if move is None:
                continue
            rank, came, goes = move
            row = self.rows[rank]
            row.insert(goes, row.pop(came))
            new = self._timed(rank)
            if new is None or (self._cost(new) > history[number % _LATE] and self._cost(new) > now):
                row.insert(came, row.pop(goes))
                continue
            timing, now = new, self._cost(new)
            self.clock.times(self.rows, self.starts)
            self.critical = None
            history[number % _LATE] = now
            if merit(timing, self.objective) < self.best.merit(self.objective):
                made = checked_candidate("local search", self.clock, [list(each) for each in self.rows])
                self.best = made or self.best
        return self.best

    def _timed(self, rank: int) -> Timing | None:
        return self.clock.times(self.rows) if self.clock.fits(rank, self.rows[rank]) else None

    def _cost(self, timing: Timing) -> float:
        """Return the time that counts and, with little weight, that of all ranks: many of them may be the longest."""
        times = self._times(timing)
        return max(times) + 0.1 * sum(times) / len(times)

    def _times(self, timing: Timing) -> list[float]:
        if self.objective == "makespan":
            return list(timing.ends)
        return [end - start for start, end in zip(timing.starts, timing.ends, strict=True)]

    def _move(self, timing: Timing) -> tuple[int, int, int] | None:
        """Choose a rank, and the old and the new place of one of its passes: mostly on the critical path."""
        kind = self.random.random()
        if kind < 0.5:
            return self._on_critical_path(timing)
        rank = self.random.randrange(len(self.rows))
        move = self._fill_gap(rank) if kind < 0.8 else self._put_off(rank, self.random.randrange(len(self.rows[rank])))
        return move and (rank, *move)

    def _on_critical_path(self, timing: Timing) -> tuple[int, int, int] | None:
        """Put off a pass that keeps the next one waiting."""
        if self.critical is None:
            times = self._times(timing)
            self.critical = critical_places(self.clock, self.rows, self.starts, times.index(max(times)))
        if not self.critical:
            return None
        rank, place = self.random.choice(self.critical)
        move = self._put_off(rank, place - 1)
        return move and (rank, *move)

    def _fill_gap(self, rank: int) -> tuple[int, int] | None:
        """Choose a gap and a later pass that could run in it: (its place, its new place)."""
        row, starts, durations = self.rows[rank], self.starts, self.clock.durations
        slack = 1e-9 * durations[row[0]]
        gaps = [
            place
            for place in range(1, len(row))
            if starts[row[place]] - starts[row[place - 1]] - durations[row[place - 1]] > slack
        ]
        if not gaps:
            return None
        place = self.random.choice(gaps)
        options = []
        seen = {row[place]}
        for later in range(place + 1, min(len(row), place + _AHEAD)):
            number = row[later]
            if not self._follows(number, seen):
                options.append(later)
            seen.add(number)
        return (self.random.choice(options[:8]), place) if options else None

    def _put_off(self, rank: int, came: int) -> tuple[int, int] | None:
        """Move a pass to a later place, often the next, no further than the passes of this rank that need it."""
        row = self.rows[rank]
        number = row[came]
        far = came
        for place in range(came + 1, min(len(row), came + _AHEAD)):
            if self._follows(row[place], {number}):
                break
            far = place
        if far == came:
            return None
        return came, came + 1 if self.random.random() < 0.4 else self.random.randint(came + 1, far)

    def _follows(self, number: int, others: set[int]) -> bool:
        """Return True if a pass has to come after one of the others, for the same stage and microbatch."""
        kind, rest = divmod(number, self.block)
        if kind == WEIGHT:
            return INPUT * self.block + rest in others
        return kind in (INPUT, FULL) and FORWARD * self.block + rest in others
