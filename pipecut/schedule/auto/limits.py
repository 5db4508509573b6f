"""Limits on what the ranks may hold: as the user gives them, and the least that can work."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import PlanError
from ..amount import amount
from .greedy import TOLERANCE, reserves
from .problem import FORWARD, INPUT, WEIGHT, Problem

MemoryLimit = float | Sequence[float] | None


def limits_of(memory_limit: MemoryLimit, ranks: int) -> tuple[float, ...]:
    """One limit for each rank; without any, there is none.

    >>> limits_of(3, ranks=2), limits_of([3, 4], ranks=2), limits_of(None, ranks=2)
    ((3.0, 3.0), (3.0, 4.0), (inf, inf))
    """
    if memory_limit is None:
        return (math.inf,) * ranks
    if not isinstance(memory_limit, Sequence) or isinstance(memory_limit, str | bytes):
        return (amount("memory_limit", memory_limit),) * ranks
    if len(memory_limit) != ranks:
        raise PlanError(f"memory_limit has {len(memory_limit)} numbers for {ranks} ranks: give one for each, or one.")
    return tuple(amount(f"memory_limit[{rank}]", each) for rank, each in enumerate(memory_limit))


def least_limits(problem: Problem) -> list[float]:
    """By rank: what one microbatch at a time needs there, all of whose forwards come before its first backward.

    Costs that do not free all that they take leave something behind with every microbatch.
    """
    kept = [
        sum(problem.growth[kind][stage] for stage in stages for kind in (FORWARD, INPUT, WEIGHT))
        for stages in problem.placement.stages_of
    ]
    before = problem.microbatches - 1
    return [needs[0] + max(0.0, each) * before for needs, each in zip(reserves(problem), kept, strict=True)]


def shortage(problem: Problem) -> tuple[int, float] | None:
    """The rank whose limit is furthest below what it needs, and that need; None if all limits will do."""
    needs = least_limits(problem)
    short = [
        (need - limit, rank)
        for rank, (need, limit) in enumerate(zip(needs, problem.limits, strict=True))
        if need > limit + TOLERANCE * abs(limit)
    ]
    if not short:
        return None
    _, rank = max(short)
    return rank, needs[rank]


def nothing_fits(problems: Sequence[Problem]) -> PlanError:
    """The error if not even one microbatch at a time fits, with the least that would."""
    problem = min(problems, key=lambda each: _most_missing(each))
    worst = shortage(problem)
    assert worst is not None
    rank, need = worst
    each = least_limits(problem)
    same = min(problem.limits) == max(problem.limits)
    least = (
        f"the least memory_limit that would do is {max(each):.6g}"
        if same
        else f"the least limits that would do are {[float(f'{one:.6g}') for one in each]}"
    )
    return PlanError(
        f"No plan fits the memory limit: rank {rank} may hold {problem.limits[rank]:.6g}, and one microbatch at a "
        f"time needs {need:.6g} there; {least}. Raise it, or make the microbatches smaller."
    )


def _most_missing(problem: Problem) -> float:
    return max(need - limit for need, limit in zip(least_limits(problem), problem.limits, strict=True))
