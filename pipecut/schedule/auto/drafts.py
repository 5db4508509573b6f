"""Which rules are tried: a grid of them, the most promising first, and then small changes of the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

from .budget import Budget
from .candidate import Candidate, accepted
from .greedy import Rules, draft
from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem
from .timing import Clock

# How many microbatches are in flight at a stage: so many times those that fill its way to the last stage and back,
# and some more. (1, 0) is that of 1F1B, (2, -1) that of ZB-H2.
DEPTHS = ((1.0, 0), (2.0, -1), (2.0, 0), (0.75, 1), (1.5, 0), (1.25, 0), (1.0, 1), (3.0, 0), (0.5, 1), (1e9, 0))
UNLIMITED = 1 << 30
LEAST = 6  # rules that are tried whatever the budget


def drafted(clock: Clock, objective: str, bound: float, budget: Budget, part: float) -> list[tuple[Rules, Candidate]]:
    """The candidates of the grid, the best first: as many as the budget allows, or until the bound is reached."""
    problem = clock.problem
    count = max(LEAST, budget.drafts(problem.passes, part))
    found: list[tuple[Rules, Candidate]] = []
    for rules, _ in zip(_grid(problem), range(count), strict=False):
        if budget.is_over():
            break
        made = accepted("rules", clock, draft(problem, rules))
        if made is None:
            continue
        found.append((rules, made))
        if made.merit(objective)[0] <= bound * (1 + 1e-9):
            break
    return sorted(found, key=lambda each: each[1].merit(objective))


def tuned(
    clock: Clock,
    start: tuple[Rules, Candidate],
    objective: str,
    bound: float,
    budget: Budget,
    part: float,
    random: Random,
) -> Candidate:
    """The best that small changes of the rules lead to, one after the other."""
    rules, best = start
    problem = clock.problem
    goal = bound * (1 + 1e-9)
    for _ in range(budget.drafts(problem.passes, part)):
        if budget.is_over() or best.merit(objective)[0] <= goal:
            break
        changed = _changed(rules, random)
        made = accepted("tuned rules", clock, draft(problem, changed))
        if made is not None and made.merit(objective) <= best.merit(objective):
            rules, best = changed, made
    return best


def _grid(problem: Problem) -> Iterator[Rules]:
    shape = _round_trips(problem)
    several = (True, False) if problem.stages > problem.ranks else (True,)
    styles = list(product(several, several, (0.0, 1.0), (False, True)))
    ways = [False, True] if _joining_pays(problem) else [False]
    for deep_forwards, deep_inputs, patience, beyond in styles:
        for joined, (scale, more) in product(ways, DEPTHS):
            yield Rules(
                depth=tuple(float(max(1, int(scale * trip + more + 1e-6))) for trip in shape),
                delay=(UNLIMITED,) * problem.ranks,
                beyond=beyond,
                patience=1 - patience,
                deep_forwards=deep_forwards,
                deep_inputs=deep_inputs,
                joined=joined,
            )


def _round_trips(problem: Problem) -> list[float]:
    """By stage: how often a forward and an input gradient fit in the time until its own gradient is back."""
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
    """One number more or less, for one stage or for all up to it."""
    depth, delay = list(rules.depth), list(rules.delay)
    where = random.randrange(len(depth))
    first = random.choice((where, 0, where, max(0, where - 1)))
    step = random.choice((-1, 1))
    for stage in range(first, where + 1):
        depth[stage] = max(1.0, depth[stage] + step)
    if random.random() < 0.25:
        rank = random.randrange(len(delay))
        delay[rank] = random.choice((0, 1, rank, 2 * rank, UNLIMITED))
        depth = list(rules.depth)
    return replace(rules, depth=tuple(depth), delay=tuple(delay))
