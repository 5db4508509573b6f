"""All choices, cut and simulated, from the fastest to the slowest; and why those that lost did."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import sympy
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, PipeError, PlanError, SplitError, StageRunError, TooLittleMemoryError
from ..pipe import Pipe
from ..pipe_ir import TracedModel, bind_inputs, clone, flatten, stand_in_for_meta, unflatten
from ..schedule import Placement, Report, search_schedule
from ..split import Chain, ConcreteCosts, SplitPlan, cut_trace, dominant_block, mean_of
from ..torch_internals import HOOK_DICTS, FakeTensorMode
from .candidate import Candidate, make_candidate, nothing_fits
from .choices import Choice, in_flight
from .costs import Stages
from .group import on_all_ranks, on_each_rank, on_first_rank
from .measure import Rehearsal, StageTimes
from .training_plan import Alternative, Source

# MERGED: Whether the model runs with other numbers of samples than the example has: tried on stand-ins, which hold
# MERGED: no data.


def refused_sizes(traced: TracedModel, source: Source, sizes: Iterable[int]) -> dict[int, str]:
    """Numbers of samples that the model cannot take, and why. What a run on stand-ins cannot tell is not refused."""
    example = traced.hints.get("batch")
    others = sorted(set(sizes) - {example})
    found = {size: fault for size in others for fault in [_broken_condition(traced, size)] if fault}
    unsettled = [size for size in others if size not in found]
    if example is not None and unsettled:
        trial = _Trial(traced, source)
        if trial.failure(example) is None:  # otherwise the model cannot run on stand-ins at all
            found |= {size: fault for size in unsettled for fault in [trial.failure(size)] if fault}
    return {size: f"the model does not run with {size} sample{'s' * (size > 1)}: {why}" for size, why in found.items()}


def nothing_runs(reasons: Iterable[str]) -> InputError:
    """The error where no size is left."""
    return InputError(
        f"{'; '.join(dict.fromkeys(reasons))}. No other size of microbatches was to be tried: use a larger batch or "
        "fewer ranks, or say which sizes to try with microbatch="
    )


def _broken_condition(traced: TracedModel, size: int) -> str | None:
    """What the model's own forward decided for the example, and would decide otherwise."""
    sizes = {**traced.hints, "batch": size}
    values = {symbol: sizes[str(symbol)] for symbol in traced.dims if str(symbol) in sizes}
    for condition in traced.conditions:
        # A module that stays whole decides anew; the model itself is cut, and does not.
        if condition.span_begin == traced.root.begin and condition.holds.subs(values) == sympy.false:
            return f"{condition.source} was traced with {condition}"
    return None


class _Trial:
    """Forwards of a copy of the model whose tensors hold no data."""

    def __init__(self, traced: TracedModel, source: Source) -> None:
        self.traced = traced
        model, self.args, self.kwargs = source
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.model = clone(model)
        stand_in_for_meta(self.model, (), self.mode)
        for module in self.model.modules():
            for name in HOOK_DICTS:
                getattr(module, name).clear()

    def failure(self, size: int) -> str | None:
        """What a forward with so many samples fails with."""
        try:
            with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings(), self.mode:
                warnings.simplefilter("ignore")
                args, kwargs = self._call(size)
                self.model(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return None

    def _call(self, size: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        weigh = ConcreteCosts(self.traced, {**self.traced.hints, "batch": size})
        shapes = {
            id(value): [int(weigh.number(dim)) for dim in spec.shape]
            for index, value in bind_inputs(self.traced.call, self.args, self.kwargs).items()
            for spec in [self.traced.operations[index].spec]
            if spec is not None
        }
        leaves, structure = flatten((self.args, self.kwargs))
        args, kwargs = unflatten(structure, [_sized(leaf, shapes.get(id(leaf))) for leaf in leaves])
        return args, kwargs


def _sized(leaf: Any, shape: list[int] | None) -> Any:
    if not isinstance(leaf, Tensor) or shape is None:
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device="cpu")


_BEST = 3  # cuts whose stages are run if costs are measured, and for which a schedule of their own is searched


@dataclass(frozen=True)
class _Audition:
    """A cut whose stages are to be run: where it is, what each rank holds, and how."""

    choice: Choice
    cut: SplitPlan
    stages_of: tuple[tuple[int, ...], ...]
    in_flight: tuple[float, ...]


@dataclass(frozen=True)
class _Winner:
    """What was chosen, without the model."""

    choice: Choice
    labels: tuple[str, ...]
    report: Report
    memory: tuple[float, ...]
    alternatives: tuple[Alternative, ...]
    balance: str
    giant: str | None  # a block that is to blame for an uneven cut, in words


@dataclass
class Ranking:
    """What was tried for the choices. `chains` are the costs of a microbatch, by its size."""

    choices: Sequence[Choice]
    chains: Mapping[int, Chain]
    ranks: int
    speeds: Sequence[float] | None
    limits: Sequence[float] | None
    remedies: Sequence[str]
    tell: Callable[[str], None]
    candidates: list[Candidate] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)

    def find(self) -> list[_Audition]:
        """Try everything; the result is the best ones."""
        problems: list[PipeError] = []
        stages: dict[tuple[int, bool], Stages] = {}
        for choice in self.choices:
            self.tell(f"{choice.schedule}, {choice.microbatches} microbatches of {choice.microbatch}")
            key = choice.microbatch, choice.recompute
            stages[key] = stages.get(key) or Stages(self.chains[choice.microbatch], choice.recompute)
            try:
                self.candidates.append(make_candidate(choice, stages[key], self.ranks, self.speeds, self.limits))
            except (SplitError, PlanError) as error:
                needs = error.needs if isinstance(error, TooLittleMemoryError) else None
                self.alternatives.append(Alternative(choice, None, None, needs, str(error)))
                problems.append(error)
        if not self.candidates:
            raise nothing_fits(problems, self.limits, self.remedies)
        self.candidates.sort(key=lambda each: each.step_time)
        return [_audition(each) for each in self.candidates[:_BEST]]

    def without(self, failed: Mapping[int, str]) -> list[_Audition]:
        """The best ones without those of some sizes of microbatches, with which stages were seen to fail."""
        gone = [each for each in self.candidates if each.choice.microbatch in failed]
        self.alternatives += [Alternative.of(each, failed[each.choice.microbatch]) for each in gone]
        self.candidates = [each for each in self.candidates if each.choice.microbatch not in failed]
        if not self.candidates:
            raise nothing_runs(failed.values())
        return [_audition(each) for each in self.candidates[:_BEST]]

    def rehearsed(self, times: Sequence[Mapping[int, StageTimes]], speeds: Sequence[float] | None) -> None:
        """The best ones with the times that their stages took. The others are taken to be as far off as these were."""
        seen = []
        for candidate, each in zip(self.candidates, times, strict=False):
            speed_of = [1.0 if speeds is None else speeds[rank] for rank in candidate.plan.placement.rank_of]
            seen.append(candidate.with_times(each, speed_of))
        off = statistics.median(
            one.step_time / other.step_time for one, other in zip(seen, self.candidates, strict=False)
        )
        others = [replace(each, off=off) for each in self.candidates[len(seen) :]]
        self.candidates = [*sorted(seen, key=lambda each: each.step_time), *others]

    def winner(self, time_budget: float) -> _Winner:
        """The best, after a search for schedules that are made for the best few cuts."""
        best = self._with_searched_schedules(time_budget)
        slower = [
            Alternative.of(each, f"{each.step_time / best.step_time - 1:.1%} slower")
            for each in self.candidates
            if each is not best
        ]
        found = sorted([*self.alternatives, *slower], key=lambda each: each.step_time or float("inf"))
        said = best.cut.summary, dominant_block(best.cut)
        return _Winner(best.choice, best.labels, best.report, best.memory, tuple(found), *said)

    def _with_searched_schedules(self, time_budget: float) -> Candidate:
        best = self.candidates[0]
        begin = time.monotonic()
        for candidate in self.candidates[:_BEST]:
            left = time_budget - (time.monotonic() - begin)
            if left <= 0:
                break
            self.tell(f"searching a schedule for the cut of {candidate.choice.schedule}")
            searched = self._searched(candidate, left / _BEST)
            if searched is not None and searched.step_time < best.step_time and self._over(searched) is None:
                best = searched
        return best

    def _searched(self, candidate: Candidate, seconds: float) -> Candidate | None:
        room = None
        if self.limits is not None:
            room = [limit - kept for limit, kept in zip(self.limits, candidate.kept, strict=True)]
        try:
            found = search_schedule(
                ranks=candidate.plan.ranks,
                microbatches=candidate.choice.microbatches,
                costs=candidate.report.costs,
                memory_limit=room,
                placement="v" if _is_v(candidate.plan.placement) else "loop",
                chunks=candidate.plan.stages // candidate.plan.ranks,
                time_budget=seconds,
                objective="makespan",
            )
        except PlanError:  # nothing fits this memory; the candidate itself does
            return None
        return candidate.with_plan(found.plan)

    def _over(self, candidate: Candidate) -> int | None:
        """A rank that needs more memory than it has."""
        limits = self.limits or ()
        return next((rank for rank, limit in enumerate(limits) if candidate.memory[rank] > limit), None)


def _audition(candidate: Candidate) -> _Audition:
    plan = candidate.plan
    stages_of = tuple(tuple(held) for held in plan.placement.stages_of)
    return _Audition(candidate.choice, candidate.cut.plan, stages_of, tuple(in_flight(plan)))


def _is_v(placement: Placement) -> bool:
    """Whether the way through the ranks turns around at the last one."""
    ranks = placement.ranks
    return placement.stages == 2 * ranks and placement.rank_of[ranks] == ranks - 1 and ranks > 1


# MERGED: The stages of a cut, run by whoever would hold them: all ranks of a group at once, or this process one by
# MERGED: one.


Result = TypeVar("Result")


def rehearse_best(
    ranking: Ranking,
    best: Sequence[_Audition],
    rehearsing: Callable[[_Audition], dict[int, StageTimes] | str],
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
    audition: _Audition,
) -> dict[int, StageTimes] | str:
    """The times of every stage, or why they do not run. In a group of several pipelines the mean of the copies."""
    choice, ranks = audition.choice, audition.stages_of

    def prepare() -> Callable[[], dict[int, StageTimes]]:
        tell(f"running the stages of {choice.schedule}")
        pipe = cut_trace(traced, audition.cut, Pipe)
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
    except StageRunError as failure:
        return str(failure)


def _mean(copies: list[StageTimes]) -> StageTimes:
    full = statistics.fmean(copy.full_backward for copy in copies)
    return StageTimes(mean_of([copy.split for copy in copies]), full)
