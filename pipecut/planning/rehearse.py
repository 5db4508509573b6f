"""The stages of a cut, run by whoever would hold them: all ranks of a group at once, or this process one by one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ..measurement.rehearsal import Rehearsal, StageTimes
from ..pipe_ir.traced import TracedModel
from ..split.costs.times import mean_of
from ..split.cut import cut_model
from .ranking import Audition
from .together import on_all_ranks, on_each_rank


def rehearse(
    audition: Audition,
    traced: TracedModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    tell: Callable[[str], None],
) -> dict[int, StageTimes]:
    """The times of every stage. In a group of several pipelines the mean of the copies."""
    choice, ranks = audition.choice, audition.stages_of

    def prepare() -> Callable[[], dict[int, StageTimes]]:
        tell(f"running the stages of {choice.schedule}")
        pipe = cut_model(traced, audition.cut)
        rehearsal = Rehearsal(pipe, args, kwargs, {"batch": choice.microbatch}, recompute=choice.recompute)
        if group is not None:
            return rehearsal.prepare(ranks[dist.get_rank(group) % len(ranks)], audition.in_flight)
        # One rank after the other, so that the copies of one are gone before those of the next are made.
        return lambda: {
            index: each for held in ranks for index, each in rehearsal.prepare(held, audition.in_flight)().items()
        }

    found = on_all_ranks(group, on_each_rank(group, prepare))
    return {index: _mean([each[index] for each in found if index in each]) for held in ranks for index in held}


def _mean(copies: list[StageTimes]) -> StageTimes:
    full = statistics.fmean(copy.full_backward for copy in copies)
    return StageTimes(mean_of([copy.split for copy in copies]), full)
