"""Greedy scheduling in the order of time: a rank that is free takes the best pass that it can run, by a few rules.

A rank never holds more than its limit, and the memory that its oldest microbatch still needs is kept free for it. So
that microbatch can go on, on every rank, and the ranks do not block each other; except by weight gradients that take
memory, and by memory that is never freed. The rows then lack the passes that are blocked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from random import Random

from .candidate import Candidate, checked_candidate
from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem, Row
from .timing import Budget, Clock

NEVER = float("inf")
_NOTHING = -1


@dataclass(frozen=True)
class Rules:
    """The choice of a rank among the passes that it can run."""

    depth: tuple[float, ...]  # by stage: forwards go first while fewer than these are in flight
    delay: tuple[int, ...]  # by rank: how many weight gradients may wait
    beyond: bool = False  # a rank with nothing else to do takes a forward beyond its depth
    patience: float = 0.0  # the part of a weight gradient by which it may keep what comes next waiting
    deep_forwards: bool = True  # the forwards of later stages go first
    deep_inputs: bool = True  # the input gradients of later stages go first
    joined: bool = False  # every backward is a full one


def _reserves(problem: Problem) -> list[list[float]]:
    """Return, by rank and number of forwards of a microbatch done there, the least memory that the rest of it needs.

    That is with full backwards, which every backward can be if there is no room between its halves.
    """
    growth = problem.growth
    table = []
    for stages in problem.placement.stages_of:
        changes = [growth[FORWARD][stage] for stage in stages]
        changes += [growth[FULL][stage] for stage in reversed(stages)]
        needs = []
        for done in range(len(stages) + 1):
            held = most = 0.0
            for change in changes[done:]:
                held += change
                most = max(most, held)
            needs.append(most)
        table.append(needs)
    return table


def _greedy_rows(problem: Problem, rules: Rules) -> tuple[Row, ...]:
    """Return the rows that the rules lead to; passes are missing where the limits block them."""
    return _GreedyScheduler(problem, rules).run()


class _GreedyScheduler:
    """The state of all ranks at one moment."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        self.problem, self.rules = problem, rules
        self.rank_of, self.stages_of = problem.placement.rank_of, problem.placement.stages_of
        self.count, self.last = problem.microbatches, problem.stages - 1
        self.backward = FULL if rules.joined else INPUT
        self.reserve = _reserves(problem)
        # Arrivals in the order of microbatches, which every stage keeps.
        self.forwards: list[list[float]] = [[] for _ in range(problem.stages)]
        self.inputs: list[list[float]] = [[] for _ in range(problem.stages)]
        self.forwards[0] = [0.0] * self.count
        self.forwards_done = [0] * problem.stages
        self.inputs_done = [0] * problem.stages
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in range(problem.ranks)]  # weight gradients
        self.weights_done = [0] * problem.ranks  # how many of `waiting` are done
        self.in_flight = [0] * problem.stages
        self.held = [0.0] * problem.ranks
        self.freeable = [0.0] * problem.ranks  # by weight gradients that wait
        self.free = [0.0] * problem.ranks
        self.rows: tuple[Row, ...] = tuple([] for _ in range(problem.ranks))
        self.limits = problem.ceilings
        self.events: list[tuple[float, int]] = []
        stages_of = self.stages_of
        self.forward_order = [held[::-1] if rules.deep_forwards else held for held in stages_of]
        self.input_order = [held[::-1] if rules.deep_inputs else held for held in stages_of]

    def run(self) -> tuple[Row, ...]:
        """Let every rank decide whenever it is free or something arrives."""
        events, free = self.events, self.free
        heappush(events, (0.0, 0))
        while events:
            now, rank = heappop(events)
            if free[rank] > now:
                continue
            while events and events[0] == (now, rank):
                heappop(events)
            self._decide(rank, now)
        return self.rows

    def _decide(self, rank: int, now: float) -> None:
        kind, stage = self._choice(rank, now)
        if kind == WEIGHT:
            stage, microbatch = self.waiting[rank][self.weights_done[rank]]
            self.weights_done[rank] += 1
            self.freeable[rank] -= self.problem.growth[WEIGHT][stage]
            self._run(rank, WEIGHT, stage, microbatch, now)
        elif kind != _NOTHING:
            done = self.forwards_done if kind == FORWARD else self.inputs_done
            self._run(rank, kind, stage, done[stage], now)

    def _choice(self, rank: int, now: float) -> tuple[int, int]:
        """Choose the kind and the stage of the next pass; a weight gradient is the one that waits longest."""
        forward, later_forward = self._next_forward(rank, now)
        gradient, later_gradient = self._next_input(rank, now)
        rules, held = self.rules, self.held[rank]
        fits = forward >= 0 and self._fits(rank, forward, held)
        wanted = forward >= 0 and self.in_flight[forward] < rules.depth[forward]
        waiting = self._ready_weights(rank)
        if fits and wanted:
            return FORWARD, forward
        if waiting > rules.delay[rank]:
            return WEIGHT, -1
        if gradient >= 0 and self._holds(rank, self.backward, gradient):
            return self.backward, gradient
        if gradient >= 0 and not waiting and self._holds(rank, FULL, gradient):
            return FULL, gradient
        if waiting and (gradient >= 0 or (wanted and self._fits(rank, forward, held + self.freeable[rank]))):
            return WEIGHT, -1  # another pass needs the memory that it frees
        if fits and rules.beyond:
            return FORWARD, forward
        if waiting:
            stage, _ = self.waiting[rank][self.weights_done[rank]]
            soon = min(later_gradient, later_forward)
            if soon == NEVER or now + self.problem.time[WEIGHT][stage] * (1 - rules.patience) <= soon:
                return WEIGHT, -1
        return _NOTHING, -1

    def _next_forward(self, rank: int, now: float) -> tuple[int, float]:
        """Return the stage of the forward to run now, or -1; and the time at which the next one is known to arrive."""
        found, soon = -1, NEVER
        for stage in self.forward_order[rank]:
            done, arrivals = self.forwards_done[stage], self.forwards[stage]
            if done < len(arrivals):
                if arrivals[done] > now:
                    soon = min(soon, arrivals[done])
                elif found < 0 or (self._is_wanted(rank, stage) and not self._is_wanted(rank, found)):
                    found = stage
        return found, soon

    def _next_input(self, rank: int, now: float) -> tuple[int, float]:
        found, soon = -1, NEVER
        for stage in self.input_order[rank]:
            done, arrivals = self.inputs_done[stage], self.inputs[stage]
            if done < len(arrivals):
                if arrivals[done] > now:
                    soon = min(soon, arrivals[done])
                elif found < 0 or not self._holds(rank, self.backward, found):
                    found = stage
        return found, soon

    def _is_wanted(self, rank: int, stage: int) -> bool:
        return self.in_flight[stage] < self.rules.depth[stage] and self._fits(rank, stage, self.held[rank])

    def _fits(self, rank: int, stage: int, held: float) -> bool:
        """Return True if a forward leaves enough for the rank's oldest microbatch."""
        stages = self.stages_of[rank]
        oldest = self.inputs_done[stages[0]]
        done = 0
        for each in stages:
            if self.forwards_done[each] <= oldest:
                break
            done += 1
        if self.forwards_done[stage] == oldest:  # it is the oldest one's own: the reserve is for this
            return held + self.reserve[rank][done] <= self.limits[rank]
        return held + self.problem.growth[FORWARD][stage] + self.reserve[rank][done] <= self.limits[rank]

    def _ready_weights(self, rank: int) -> int:
        """Count the weight gradients that wait and could run now."""
        waiting, done = self.waiting[rank], self.weights_done[rank]
        if done == len(waiting) or not self._holds(rank, WEIGHT, waiting[done][0]):
            return 0
        return len(waiting) - done

    def _holds(self, rank: int, kind: int, stage: int) -> bool:
        """Return True if a pass can run within the limit: one that frees memory always can."""
        growth = self.problem.growth[kind][stage]
        return growth <= 0 or self.held[rank] + growth <= self.limits[rank]

    def _run(self, rank: int, kind: int, stage: int, microbatch: int, now: float) -> None:
        problem, events = self.problem, self.events
        end = now + problem.time[kind][stage]
        self.rows[rank].append((kind * problem.stages + stage) * self.count + microbatch)
        self.held[rank] += problem.growth[kind][stage]
        self.free[rank] = end
        heappush(events, (end, rank))
        if kind == FORWARD:
            self.forwards_done[stage] += 1
            self.in_flight[stage] += 1
            if stage == self.last:
                self.inputs[stage].append(end)
            else:
                self.forwards[stage + 1].append(end + problem.down[stage])
                heappush(events, (end + problem.down[stage], self.rank_of[stage + 1]))
        elif kind != WEIGHT:
            self.inputs_done[stage] += 1
            self.in_flight[stage] -= 1
            if stage > 0:
                self.inputs[stage - 1].append(end + problem.up[stage])
                heappush(events, (end + problem.up[stage], self.rank_of[stage - 1]))
            if kind == INPUT:
                self.waiting[rank].append((stage, microbatch))
                self.freeable[rank] += problem.growth[WEIGHT][stage]


# Microbatches in flight at a stage: so many times those that fill its way to the last stage and back, and some more.
# (1, 0) is that of 1F1B, (2, -1) that of ZB-H2.
_DEPTHS = ((1.0, 0), (2.0, -1), (2.0, 0), (0.75, 1), (1.5, 0), (1.25, 0), (1.0, 1), (3.0, 0), (0.5, 1), (1e9, 0))
_UNLIMITED = 1 << 30
_LEAST = 6  # rules that are tried whatever the budget


def greedy_candidates(
    clock: Clock, objective: str, bound: float, budget: Budget, part: float
) -> list[tuple[Rules, Candidate]]:
    """Return the candidates of a grid of rules, the best first: as many as the budget allows, or until the bound."""
    problem = clock.problem
    count = max(_LEAST, budget.greedy_runs(problem.passes, part))
    found: list[tuple[Rules, Candidate]] = []
    for rules, _ in zip(_grid(problem), range(count), strict=False):
        if budget.is_over():
            break
        made = checked_candidate("greedy", clock, _greedy_rows(problem, rules))
        if made is None:
            continue
        found.append((rules, made))
        if made.merit(objective)[0] <= bound * (1 + 1e-9):
            break
    return sorted(found, key=lambda each: each[1].merit(objective))


def tune_rules(
    clock: Clock,
    start: tuple[Rules, Candidate],
    objective: str,
    bound: float,
    budget: Budget,
    part: float,
    random: Random,
) -> Candidate:
    """Return the best candidate that small changes of the rules lead to, one after the other."""
    rules, best = start
    problem = clock.problem
    goal = bound * (1 + 1e-9)
    for _ in range(budget.greedy_runs(problem.passes, part)):
        if budget.is_over() or best.merit(objective)[0] <= goal:
            break
        changed = _changed(rules, random)
        made = checked_candidate("greedy, tuned", clock, _greedy_rows(problem, changed))
        if made is not None and made.merit(objective) <= best.merit(objective):
            rules, best = changed, made
    return best


def _grid(problem: Problem) -> Iterator[Rules]:
    shape = _round_trips(problem)
    several = (True, False) if problem.stages > problem.ranks else (True,)
    styles = list(product(several, several, (0.0, 1.0), (False, True)))
    ways = [False, True] if _joining_pays(problem) else [False]
    for deep_forwards, deep_inputs, patience, beyond in styles:
        for joined, (scale, more) in product(ways, _DEPTHS):
            yield Rules(
                depth=tuple(float(max(1, int(scale * trip + more + 1e-6))) for trip in shape),
                delay=(_UNLIMITED,) * problem.ranks,
                beyond=beyond,
                patience=1 - patience,
                deep_forwards=deep_forwards,
                deep_inputs=deep_inputs,
                joined=joined,
            )


def _round_trips(problem: Problem) -> list[float]:
    """Count, by stage, the pairs of forward and input gradient that fit in the time until its own gradient is back."""
    time, stages = problem.time, problem.stages
    one = [time[FORWARD][stage] + time[INPUT][stage] for stage in range(stages)]
    unit = max(sum(one) / stages, 1e-300)
    trips, way = [], 0.0
    for stage in reversed(range(stages)):
        way += one[stage] / unit
        trips.append(way)
    return trips[::-1]


def _joining_pays(problem: Problem) -> bool:
    return any(
        full < one + other
        for full, one, other in zip(problem.time[FULL], problem.time[INPUT], problem.time[WEIGHT], strict=True)
    )


def _changed(rules: Rules, random: Random) -> Rules:
    """Change one number of the rules, for one stage or for all up to it."""
    depth, delay = list(rules.depth), list(rules.delay)
    where = random.randrange(len(depth))
    first = random.choice((where, 0, where, max(0, where - 1)))
    step = random.choice((-1, 1))
    for stage in range(first, where + 1):
        depth[stage] = max(1.0, depth[stage] + step)
    if random.random() < 0.25:
        rank = random.randrange(len(delay))
        delay[rank] = random.choice((0, 1, rank, 2 * rank, _UNLIMITED))
        depth = list(rules.depth)
    return replace(rules, depth=tuple(depth), delay=tuple(delay))
