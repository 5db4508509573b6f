"""The schedules that have a name, as candidates, and the simplest one."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import PlanError
from ..registry import FAMILIES, plan_for
from .candidate import Candidate, accepted
from .limits import Excess
from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem, Row
from .timing import Clock

ONE_AT_A_TIME = "one microbatch at a time"


def fixed_candidates(clock: Clock) -> Iterator[tuple[str, Candidate | Excess | str]]:
    """The name of every fixed schedule with this placement, and its candidate or why it is out."""
    problem = clock.problem
    for name, rows in _rows(problem):
        if isinstance(rows, str):
            yield name, rows
        else:
            yield name, accepted(name, clock, rows) or Excess(name, problem.limits, tuple(clock.peaks(rows)))


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
    yield ONE_AT_A_TIME, [_one_at_a_time(problem, stages) for stages in placement.stages_of]


def _one_at_a_time(problem: Problem, stages: tuple[int, ...]) -> Row:
    """A microbatch after the other, with the least memory: what fits if anything does.

    A weight gradient that frees memory is made in one with the input gradient, so that what that takes is never held;
    one that takes memory comes when all else is done. No order needs less where no forward frees memory and no full
    backward takes any: a rank holds all forwards of a microbatch before its first backward, besides what the
    microbatches before have left.
    """
    late = [stage for stage in stages if problem.growth[WEIGHT][stage] > 0]
    kinds = [(FORWARD, stage) for stage in stages]
    kinds += [(INPUT if stage in late else FULL, stage) for stage in reversed(stages)]
    microbatches = range(problem.microbatches)
    order = [(kind, stage, microbatch) for microbatch in microbatches for kind, stage in kinds]
    order += [(WEIGHT, stage, microbatch) for microbatch in microbatches for stage in late]
    return [(kind * problem.stages + stage) * len(microbatches) + microbatch for kind, stage, microbatch in order]
