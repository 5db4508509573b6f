"""The schedules that have a name, as candidates, and the simplest one."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import PlanError
from ..registry import FAMILIES, plan_for
from .candidate import Candidate
from .greedy import TOLERANCE
from .problem import FORWARD, INPUT, WEIGHT, Problem, Row
from .timing import Clock


def fixed_candidates(problem: Problem) -> Iterator[tuple[str, Candidate | str]]:
    """The name of every fixed schedule with this placement, and its rows or why it is out."""
    clock = Clock(problem)
    for name, rows in _rows(problem):
        if isinstance(rows, str):
            yield name, rows
            continue
        over = [
            (rank, peak)
            for rank, peak in enumerate(clock.peaks(rows))
            if peak > problem.limits[rank] + TOLERANCE * abs(problem.limits[rank])
        ]
        timing = clock.times(rows)
        assert timing is not None, name
        if over:
            rank, peak = max(over, key=lambda each: each[1] - problem.limits[each[0]])
            yield name, f"rank {rank} would hold {peak:.6g}, its limit is {problem.limits[rank]:.6g}"
        else:
            yield name, Candidate(name, problem, rows, timing)


def _rows(problem: Problem) -> Iterator[tuple[str, list[Row] | str]]:
    """The rows of each schedule, or why it cannot be made for these sizes."""
    placement, microbatches = problem.placement, problem.microbatches
    chunks = placement.stages // placement.ranks
    # Those made for this number of chunks go first: of equals, the first is taken.
    for name, family in sorted(FAMILIES.items(), key=lambda each: each[1].chunks != chunks):
        if family.any_chunks or family.chunks == chunks:
            try:
                plan = plan_for(name, ranks=placement.ranks, microbatches=microbatches, chunks=chunks)
            except PlanError as error:
                yield name, str(error)
                continue
            if plan.placement == placement and plan.training:
                yield name, [problem.row_of(actions) for actions in plan.actions]
    yield "one at a time", [_one_at_a_time(problem, stages) for stages in placement.stages_of]


def _one_at_a_time(problem: Problem, stages: tuple[int, ...]) -> Row:
    """A microbatch after the other: what fits if anything does."""
    count, all_stages = problem.microbatches, problem.stages
    kinds = [(FORWARD, stage) for stage in stages]
    kinds += [(kind, stage) for stage in reversed(stages) for kind in (INPUT, WEIGHT)]
    return [(kind * all_stages + stage) * count + microbatch for microbatch in range(count) for kind, stage in kinds]
