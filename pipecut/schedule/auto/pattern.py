"""Plans of one pattern: forwards, then pairs, then weight gradients too, as in ZB-H2, with counts made for the costs.

Rank r runs n forwards before its first input gradient, and a weight gradients after its last:

    F x n   (I F) x a   (I W F) ...   (I W) ...   W x a

A forward that a rank begins shortly before its first gradient arrives keeps that gradient waiting, and all ranks above
it; a forward that it does not begin leaves it idle until then. Either is paid once, in the time of the whole plan, and
one rank's delay changes what fits on the next. So the n are chosen together, from the last rank to the first. The a
follow from the first rank to the last: a rank that is down the pipeline has its last input gradient earlier, and ends
later, and this time is for weight gradients.
"""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

from ..families.building import with_late_weights
from .candidate import Candidate, checked_candidate, cost, merit
from .problem import FORWARD, INPUT, WEIGHT, Problem, Row
from .timing import Budget, Clock

_KEPT = 40  # partial choices of warm-ups that are followed at a time
_TRIED = 6  # of the whole ones
_LATE = 20  # changes after which a plan must not be worse


class Pattern(NamedTuple):
    """The counts of each rank."""

    warm_up: tuple[int, ...]
    delay: tuple[int, ...]


class _Choice(NamedTuple):
    """The warm-ups of some last ranks."""

    time: float  # the least that is left for a plan
    arrival: float  # of the first gradient at the rank above
    counts: tuple[int, ...]
    idle: tuple[float, ...]


def pattern_candidates(clock: Clock, objective: str, budget: Budget) -> list[tuple[Pattern, Candidate]]:
    """Return the candidates of some patterns, the best first; none for several stages per rank."""
    found: list[tuple[Pattern, Candidate]] = []
    for pattern in _patterns(clock.problem):
        if budget.is_over() and found:
            break
        made = checked_candidate("pattern", clock, _rows(clock.problem, pattern))
        if made is not None:
            found.append((pattern, made))
    return sorted(found, key=lambda each: each[1].merit(objective))


def tune_pattern(
    clock: Clock,
    start: tuple[Pattern, Candidate],
    objective: str,
    bound: float,
    budget: Budget,
    part: float,
    random: Random,
) -> Candidate:
    """Return the best candidate that small changes of the counts lead to, one after the other.

    A change that makes the plan worse is kept if it is no worse than the plan was some changes before.
    """
    pattern, best = start
    problem = clock.problem
    rows = list(best.rows)
    least = cost(best.timing, objective)
    history = [least] * _LATE
    for number in range(budget.timings(problem.passes, part)):
        if budget.is_over() or best.merit(objective)[0] <= bound * (1 + 1e-9):
            break
        changed = _changed(pattern, problem.microbatches, random)
        pairs = enumerate(zip(zip(*changed, strict=True), zip(*pattern, strict=True), strict=True))
        new = [rows[rank] if now == before else _row(problem, rank, *now) for rank, (now, before) in pairs]
        fits = all(clock.fits(rank, row) for rank, row in enumerate(new) if row is not rows[rank])
        timing = clock.times(new) if fits else None
        if timing is None or cost(timing, objective) > max(least, history[number % _LATE]):
            continue
        pattern, rows, least = changed, new, cost(timing, objective)
        history[number % _LATE] = least
        if merit(timing, objective) < best.merit(objective):
            best = checked_candidate("pattern, tuned", clock, rows) or best
    return best


def _changed(pattern: Pattern, most: int, random: Random) -> Pattern:
    """Change one of the counts of a rank, or of several that follow each other, by one."""
    first = random.randrange(len(pattern.delay))
    last = first + random.choice((0, 0, 0, 1, 2, 4, 8, len(pattern.delay)))
    step = random.choice((-1, 1))
    which = random.choice(("warm_up", "delay", "delay"))
    least = 1 if which == "warm_up" else 0
    counts = tuple(
        min(most, max(least, count + step)) if first <= rank <= last else count
        for rank, count in enumerate(getattr(pattern, which))
    )
    return pattern._replace(**{which: counts})


def _rows(problem: Problem, pattern: Pattern) -> list[Row]:
    return [_row(problem, rank, *counts) for rank, counts in enumerate(zip(*pattern, strict=True))]


def _row(problem: Problem, rank: int, warm_up: int, delay: int) -> Row:
    count = problem.microbatches
    firsts = [(kind * problem.stages + rank) * count for kind in (FORWARD, INPUT, WEIGHT)]
    streams = (iter(range(first, first + count)) for first in firsts)
    return list(with_late_weights(count, *streams, warm_up=warm_up, delay=delay))


def _patterns(problem: Problem) -> list[Pattern]:
    if problem.stages > problem.ranks:
        return []
    choices = _warm_ups(problem)[:_TRIED]
    return list(dict.fromkeys(_with_delays(problem, _fewer(problem, choice)) for choice in choices))


def _fewer(problem: Problem, choice: _Choice) -> _Choice:
    """Let every rank begin with fewer forwards than the one above it, unless that begins with all.

    Otherwise it would wait for a forward that follows a gradient which it has still to send.
    """
    counts: list[int] = []
    idle: list[float] = []
    for rank, (count, wait) in enumerate(zip(choice.counts, choice.idle, strict=True)):
        above = problem.microbatches + 1 if not counts or counts[-1] == problem.microbatches else counts[-1]
        counts.append(max(1, min(count, above - 1)))
        idle.append(wait + (count - counts[-1]) * problem.time[FORWARD][rank])
    return choice._replace(counts=tuple(counts), idle=tuple(idle))


def _warm_ups(problem: Problem) -> list[_Choice]:
    starts = _forward_starts(problem)
    time = problem.time
    choices = [_Choice(0.0, 0.0, (), ())]
    for rank in reversed(range(problem.ranks)):
        ends = [start + time[FORWARD][rank] for start in starts[rank]]
        left = _time_left(problem, starts, rank)
        found: list[_Choice] = []
        for choice in choices:
            gradient = ends[0] if rank == problem.ranks - 1 else choice.arrival
            in_time = max(1, sum(end <= gradient * (1 + 1e-12) for end in ends))
            for count in {in_time, min(in_time + 1, len(ends))}:
                begins = max(gradient, ends[count - 1])
                waits = begins - starts[rank][0] - count * time[FORWARD][rank]
                arrival = begins + time[INPUT][rank] + problem.up[rank]
                longest = max(choice.time, problem.work[rank] + waits, arrival + left)
                found.append(_Choice(longest, arrival, (count, *choice.counts), (waits, *choice.idle)))
        kept: dict[float, _Choice] = {}
        for choice in sorted(found):
            kept.setdefault(round(choice.arrival, 9), choice)
        choices = list(kept.values())[:_KEPT]
    return choices


def _time_left(problem: Problem, starts: list[list[float]], rank: int) -> float:
    """Return the least time of a rank above, besides the arrival of the first gradient there, if nothing delays it."""
    most, way = -math.inf, 0.0
    for above in reversed(range(rank)):
        waits = way - starts[above][0] - len(starts[above]) * problem.time[FORWARD][above]
        most = max(most, problem.work[above] + waits)
        way += problem.time[INPUT][above] + problem.up[above]
    return most


def _with_delays(problem: Problem, choice: _Choice) -> Pattern:
    """Add the numbers of weight gradients after the last input gradient, from the first rank to the last."""
    time, count = problem.time, problem.microbatches
    start, last = 0.0, math.inf  # of the rank, and the latest end of its last input gradient
    delays = []
    for rank in range(problem.ranks):
        weight = time[WEIGHT][rank]
        end = start + choice.time
        last = min(last, end - weight)
        tail = (end - last) / weight if weight > 0 else 1.0
        spare = choice.time - problem.work[rank] - choice.idle[rank]
        whole = math.floor(tail + 1e-9)
        if (tail - whole) * weight > spare + 1e-9:
            whole += 1
        whole = max(1, min(whole, count, _room(problem, rank, choice.counts[rank]) + 1))
        delays.append(whole - 1)
        last = min(last, end - whole * weight) - time[INPUT][rank] - problem.up[min(rank + 1, problem.stages - 1)]
        start += time[FORWARD][rank] + problem.down[rank]
    return Pattern(choice.counts, tuple(delays))


def _room(problem: Problem, rank: int, warm_up: int) -> int:
    """Return the number of weight gradients that may wait beside so many forwards."""
    kept = problem.growth[FORWARD][rank] + problem.growth[INPUT][rank]
    room = problem.ceilings[rank] - warm_up * problem.growth[FORWARD][rank]
    if kept <= 0 or math.isinf(room):
        return problem.microbatches
    most = int(max(0.0, room) // kept)
    return most if most < problem.microbatches - warm_up else problem.microbatches


def _forward_starts(problem: Problem) -> list[list[float]]:
    """Return, by rank, the starts of as many forwards as it may hold, if all go on as soon as they can."""
    forward = problem.time[FORWARD]
    starts: list[list[float]] = []
    for rank in range(problem.ranks):
        grow, room = problem.growth[FORWARD][rank], problem.ceilings[rank]
        most = problem.microbatches if grow <= 0 or math.isinf(room) else int(room // grow)
        free, row = 0.0, []
        for number in range(max(1, min(problem.microbatches, most))):
            arrival = 0.0
            if rank:
                if number == len(starts[-1]):
                    break
                arrival = starts[-1][number] + forward[rank - 1] + problem.down[rank - 1]
            row.append(max(free, arrival))
            free = row[-1] + forward[rank]
        starts.append(row)
    return starts
