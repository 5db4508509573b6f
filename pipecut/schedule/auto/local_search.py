"""Local search: move single passes to other places in their rank's order while that shortens the plan.

A change that makes the plan worse is kept if it is no worse than the plan was some changes before (late acceptance), so
that the search can leave a local optimum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from .candidate import Candidate, checked_candidate, cost, merit
from .greedy import NEVER
from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem, Row
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
        now = cost(timing, self.objective)
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
            if new is None or (cost(new, self.objective) > history[number % _LATE] and cost(new, self.objective) > now):
                row.insert(came, row.pop(goes))
                continue
            timing, now = new, cost(new, self.objective)
            self.clock.times(self.rows, self.starts)
            self.critical = None
            history[number % _LATE] = now
            if merit(timing, self.objective) < self.best.merit(self.objective):
                made = checked_candidate("local search", self.clock, [list(each) for each in self.rows])
                self.best = made or self.best
        return self.best

    def _timed(self, rank: int) -> Timing | None:
        return self.clock.times(self.rows) if self.clock.fits(rank, self.rows[rank]) else None

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
            times = timing.times(self.objective)
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


# Place weight gradients where they cost least, with the forwards and input gradients of a plan in their order.
#
# A weight gradient waits until its rank has nothing else to do, too many of them wait, or the next pass needs the
# memory that it frees. With all of them done there may still be no room between the halves of a backward: then it is
# done as one. So a rank never holds more than its limit. Weight gradients that take memory can make that impossible in
# the given order; the rows then end where a rank cannot go on.


@dataclass(frozen=True)
class _WeightPolicy:
    """A policy for the time of weight gradients, by rank."""

    patience: tuple[float, ...]  # the part of one by which it may keep the next pass waiting
    delay: tuple[int, ...]  # how many may wait


def _place_weights(clock: Clock, rows: Sequence[Row], policy: _WeightPolicy) -> tuple[Row, ...]:
    """Add the weight gradients to rows of forwards and input gradients. Passes are missing if a rank is stuck."""
    return _WeightPlacement(clock, rows, policy).run()


class _WeightPlacement:
    """The state of all ranks at one moment."""

    def __init__(self, clock: Clock, rows: Sequence[Row], policy: _WeightPolicy) -> None:
        self.clock, self.problem, self.policy = clock, clock.problem, policy
        self.block = self.problem.stages * self.problem.microbatches
        self.left = [row[::-1] for row in rows]
        self.waiting: list[deque[int]] = [deque() for _ in rows]
        self.rows: tuple[Row, ...] = tuple([] for _ in rows)
        self.done = [-1.0] * (clock.nothing + 2)
        self.done[clock.nothing] = 0.0
        self.held = [0.0] * len(rows)
        self.limits = self.problem.ceilings
        self.free = [0.0] * len(rows)
        self.events: list[tuple[float, int]] = []

    def run(self) -> tuple[Row, ...]:
        """Let every rank decide whenever it is free or something arrives."""
        events, free = self.events, self.free
        for rank in range(len(free)):
            heappush(events, (0.0, rank))
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                self._decide(rank, now)
        return self.rows

    def _decide(self, rank: int, now: float) -> None:
        left, waiting = self.left[rank], self.waiting[rank]
        ready = len(waiting) if waiting and self._fits(rank, waiting[0]) else 0
        arrival = NEVER
        if left:
            arrival = self.done[self.clock.needs[left[-1]]]
            if arrival < 0:
                arrival = NEVER
            elif arrival <= now and ready <= self.policy.delay[rank]:
                number = self._fitting(rank, left[-1], alone=not ready)
                if number is not None:
                    left.pop()
                    self._run(rank, number, now)
                    return
        if ready:
            spare = self.clock.durations[waiting[0]] * (1 - self.policy.patience[rank])
            if arrival <= now or arrival == NEVER or now + spare <= arrival or ready > self.policy.delay[rank]:
                self._run(rank, waiting.popleft(), now)

    def _fitting(self, rank: int, number: int, *, alone: bool) -> int | None:
        """Return the pass if there is room for it; if no weight gradient can make any, its full backward."""
        if self._fits(rank, number):
            return number
        joined = number + (FULL - INPUT) * self.block
        return joined if alone and number // self.block == INPUT and self._fits(rank, joined) else None

    def _fits(self, rank: int, number: int) -> bool:
        growth = self.clock.growth[number]
        return growth <= 0 or self.held[rank] + growth <= self.limits[rank]

    def _run(self, rank: int, number: int, now: float) -> None:
        kind, rest = divmod(number, self.block)
        end = now + self.clock.durations[number]
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


_UNLIMITED = 1 << 30


def placed_weights(
    clock: Clock, candidates: Sequence[Candidate], objective: str, budget: Budget
) -> Iterator[Candidate]:
    """Place the weight gradients of each candidate anew, by the best of several policies; `candidates` are sorted.

    Left out are those that cannot become the best, wherever their weight gradients are, and repeated orders.
    """
    best = candidates[0].merit(objective) if candidates else (0.0, 0.0)
    done: list[list[Row]] = []
    for candidate in candidates:
        if budget.is_over():
            return
        rows = _without_weights(clock.problem, candidate.rows)
        least = clock.times(rows)
        assert least is not None  # with weight gradients between them they could be gone through
        if merit(least, objective) >= best or rows in done:
            continue
        done.append(rows)
        name = f"{candidate.name}, weights moved"
        policies = _weight_policies(clock.problem.ranks)
        made = (checked_candidate(name, clock, _place_weights(clock, rows, policy)) for policy in policies)
        fitting = [each for each in made if each is not None]
        if fitting:
            best_placed = min(fitting, key=lambda each: each.merit(objective))
            best = min(best, best_placed.merit(objective))
            yield best_placed


def _without_weights(problem: Problem, rows: Sequence[Row]) -> list[Row]:
    """Return the forwards and input gradients, the latter also in the place of full backwards."""
    block = problem.stages * problem.microbatches
    shift = (FULL - INPUT) * block
    return [
        [number - shift if number >= FULL * block else number for number in row if number // block != WEIGHT]
        for row in rows
    ]


def _weight_policies(ranks: int) -> Iterator[_WeightPolicy]:
    """Return the policies to try. Nothing waits for the gradients of the first rank, so that it may take its time."""
    unlimited = (_UNLIMITED,) * ranks
    yield _WeightPolicy((1.0, *(0.0,) * (ranks - 1)), unlimited)
    yield _WeightPolicy((0.0,) * ranks, unlimited)
    yield _WeightPolicy((0.5,) * ranks, unlimited)
    yield _WeightPolicy((1.0,) * ranks, tuple(range(ranks)))
