"""The stages of a cut, run by whoever would hold them: all ranks of a group at once, or this process one by one."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ..measurement.rehearsal import Rehearsal, StageFailure, StageTimes
from ..pipe_ir.traced import TracedModel
from ..split.costs.times import mean_of
from ..split.cut import cut_model
from .choices import Choice
from .ranking import Audition, Ranking
from .together import on_all_ranks, on_each_rank, on_first_rank

Result = TypeVar("Result")


def rehearse_best(
    ranking: Ranking,
    best: Sequence[Audition],
    rehearsing: Callable[[Audition], dict[int, StageTimes] | str],
    group: dist.ProcessGroup | None,
) -> list[dict[int, StageTimes]]:
    """The times of the best cuts. A size of microbatches with which stages fail is dropped, and others are tried."""
    seen: dict[Choice, dict[int, StageTimes] | str] = {}
    while True:
        for each in best:
            if each.choice not in seen:
                seen[each.choice] = rehearsing(each)
        found = [seen[each.choice] for each in best]
        failed = {
            each.choice.microbatch: times for each, times in zip(best, found, strict=True) if isinstance(times, str)
        }
        if not failed:
            return [times for times in found if not isinstance(times, str)]
        best = on_first_rank(group, functools.partial(ranking.without, failed))


def rehearse(
    traced: TracedModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    tell: Callable[[str], None],
    audition: Audition,
) -> dict[int, StageTimes] | str:
    """The times of every stage, or why they do not run. In a group of several pipelines the mean of the copies."""
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

    ready = on_each_rank(group, functools.partial(_attempt, prepare))
    found = on_all_ranks(group, functools.partial(_attempt, ready) if callable(ready) else lambda: ready)
    failures = [each for each in found if isinstance(each, str)]
    if failures:
        samples = f"{choice.microbatch} sample{'s' * (choice.microbatch > 1)}"
        return f"the model does not run with {samples}: {failures[0]}"
    times = [each for each in found if not isinstance(each, str)]
    return {index: _mean([each[index] for each in times if index in each]) for held in ranks for index in held}


def _attempt(call: Callable[[], Result]) -> Result | str:
    """What a call gives, or why a stage failed in it."""
    try:
        return call()
    except StageFailure as failure:
        return str(failure)


def _mean(copies: list[StageTimes]) -> StageTimes:
    full = statistics.fmean(copy.full_backward for copy in copies)
    return StageTimes(mean_of([copy.split for copy in copies]), full)
