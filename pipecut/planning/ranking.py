"""Candidates of all choices, from the fastest to the slowest, with measured times of the best if asked for."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import PipeError, PlanError, SplitError, StageRunError, TooLittleMemoryError
from ..pipe import Pipe
from ..pipe_ir import TracedModel
from ..schedule import Placement, Report, search_schedule
from ..split import Chain, SplitPlan, cut_trace, dominant_block, mean_of
from ..text import counted
from .candidate import Candidate, make_candidate, no_fit_error
from .choices import Choice, in_flight, no_size_error
from .costs import FreeCuts, StageCosts
from .group import on_all_ranks, on_each_rank, on_first_rank
from .measure import StageBenchmark, StageTimes
from .replicas import Layout
from .training_plan import Alternative

_T = TypeVar("_T")

_PROBE = "1F1B"  # the schedule by which numbers of pipelines are compared first
_BEST = 3  # candidates whose stages are measured, and for which a schedule of their own is searched


@dataclass(frozen=True)
class _CandidateCut:
    """A candidate without its costs, to be measured: its cut, and the stages of each rank."""

    choice: Choice
    cut: SplitPlan
    stages_of: tuple[tuple[int, ...], ...]
    in_flight: tuple[float, ...]


@dataclass(frozen=True)
class _Selection:
    """The chosen candidate, without the model."""

    choice: Choice
    labels: tuple[str, ...]
    report: Report
    memory: tuple[float, ...]
    alternatives: tuple[Alternative, ...]
    factorisations: tuple[Alternative, ...]
    balance: str
    dominant_block: str | None  # the block that makes the cut uneven, in words


@dataclass
class Ranking:
    """Candidates of all choices, sorted by time. `chains` are the costs of a microbatch, by its size.

    Speeds and limits are those of all ranks.
    """

    choices: Sequence[Choice]
    chains: Mapping[int, Chain]
    speeds: Sequence[float] | None
    limits: Sequence[float] | None
    remedies: Sequence[str]
    progress: Callable[[str], None]
    candidates: list[Candidate] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)

    def try_all(self) -> list[_CandidateCut]:
        """Make all candidates, and return the cuts of the best."""
        problems: list[PipeError] = []
        source = _StageCostsSource(self.chains)
        for choice in self._by_bound(source):
            self.progress(_words(choice))
            layout = choice.layout
            try:
                limits, speeds = layout.least(self.limits), layout.least(self.speeds)
                self.candidates.append(make_candidate(choice, source.of(choice), speeds, limits))
            except (SplitError, PlanError) as error:
                needs = error.needs if isinstance(error, TooLittleMemoryError) else None
                self.alternatives.append(Alternative(choice, None, None, needs, str(error)))
                problems.append(_of_all_ranks(error, layout))
        if not self.candidates:
            raise no_fit_error(problems, self.limits, self.remedies)
        self.candidates.sort(key=lambda each: each.step_time)
        return [_cut_of(each) for each in self.candidates[:_BEST]]

    def _by_bound(self, source: _StageCostsSource) -> Iterator[Choice]:
        """Yield the choices; of several numbers of pipelines, those whose work alone takes less than the best.

        First comes one schedule for all numbers of pipelines, so that each has its best time in the table, then the
        others, each with the least work first.
        """
        counts = {choice.layout.replicas for choice in self.choices}
        if len(counts) == 1:
            yield from self.choices
            return
        names = [choice.schedule for choice in self.choices]
        probe = _PROBE if _PROBE in names else names[0]
        bounds = {choice: source.least_time(choice, self.speeds) for choice in self.choices}
        for choice in sorted(self.choices, key=lambda choice: (choice.schedule != probe, bounds[choice])):
            rivals = [
                each.step_time
                for each in self.candidates
                if choice.schedule != probe or each.choice.layout.replicas == choice.layout.replicas
            ]
            if bounds[choice] < min(rivals, default=math.inf):
                yield choice
                continue
            reason = f"its work alone takes {1000 * bounds[choice]:.4g} ms on each rank"
            self.alternatives.append(Alternative(choice, None, None, None, reason))

    def drop_sizes(self, failed: Mapping[int, str]) -> list[_CandidateCut]:
        """Drop candidates with sizes of microbatches for which stages failed; return the cuts of the best others."""
        gone = [each for each in self.candidates if each.choice.microbatch in failed]
        self.alternatives += [Alternative.of(each, failed[each.choice.microbatch]) for each in gone]
        self.candidates = [each for each in self.candidates if each.choice.microbatch not in failed]
        if not self.candidates:
            raise no_size_error(failed.values())
        return [_cut_of(each) for each in self.candidates[:_BEST]]

    def use_measured_times(self, times: Sequence[Mapping[int, StageTimes]], speeds: Sequence[float] | None) -> None:
        """Give the best candidates the measured times of their stages, and correct the others by the median ratio."""
        measured = []
        for candidate, each in zip(self.candidates, times, strict=False):
            own = candidate.choice.layout.least(speeds)
            speed_of = [1.0 if own is None else own[rank] for rank in candidate.plan.placement.rank_of]
            measured.append(candidate.with_times(each, speed_of))
        slowdown = statistics.median(
            one.step_time / other.step_time for one, other in zip(measured, self.candidates, strict=False)
        )
        others = [replace(each, slowdown=slowdown) for each in self.candidates[len(measured) :]]
        self.candidates = [*sorted(measured, key=lambda each: each.step_time), *others]

    def select(self, time_budget: float) -> _Selection:
        """Return the best candidate, after a search for schedules of the best few cuts."""
        best = self._with_searched_schedules(time_budget)
        slower = [
            Alternative.of(each, f"{each.step_time / best.step_time - 1:.1%} slower")
            for each in self.candidates
            if each is not best
        ]
        found = sorted([*self.alternatives, *slower], key=lambda each: each.step_time or float("inf"))
        words = best.cut.summary, dominant_block(best.cut)
        each = self._factorisations(best, found)
        return _Selection(best.choice, best.labels, best.report, best.memory, tuple(found), each, *words)

    def _factorisations(self, best: Candidate, others: Sequence[Alternative]) -> tuple[Alternative, ...]:
        """Return the best plan for each number of pipelines, or the reason why there is none."""
        first = {best.choice.layout.replicas: Alternative.of(best, "taken")}
        for each in others:
            first.setdefault(each.choice.layout.replicas, each)
        return tuple(first[count] for count in sorted(first)) if len(first) > 1 else ()

    def _with_searched_schedules(self, time_budget: float) -> Candidate:
        best = self.candidates[0]
        begin = time.monotonic()
        for candidate in self.candidates[:_BEST]:
            left = time_budget - (time.monotonic() - begin)
            if left <= 0:
                break
            self.progress(f"searching a schedule for the cut of {candidate.choice.schedule}")
            searched = self._searched(candidate, left / _BEST)
            if searched is not None and searched.step_time < best.step_time and self._fits(searched):
                best = searched
        return best

    def _searched(self, candidate: Candidate, seconds: float) -> Candidate | None:
        room = None
        limits = candidate.choice.layout.least(self.limits)
        if limits is not None:
            room = [limit - constant for limit, constant in zip(limits, candidate.constant, strict=True)]
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

    def _fits(self, candidate: Candidate) -> bool:
        limits = candidate.choice.layout.least(self.limits) or ()
        return all(candidate.memory[rank] <= limit for rank, limit in enumerate(limits))


class _StageCostsSource:
    """Makes the costs of stages for choices, once for those that share them."""

    def __init__(self, chains: Mapping[int, Chain]) -> None:
        self.chains = chains
        self._known: dict[tuple[int, bool, Layout], StageCosts] = {}
        self._cuts: dict[tuple[int, bool, float], FreeCuts] = {}

    def of(self, choice: Choice) -> StageCosts:
        """Return the costs of the stages of a choice."""
        size, again, layout = key = choice.microbatch, choice.recompute, choice.layout
        if key not in self._known:
            chain = self.chains[size]
            cuts = self._cuts.setdefault((size, again, layout.machine(chain.machine).link_bandwidth), {})
            self._known[key] = StageCosts(chain, again, layout, cuts)
        return self._known[key]

    def least_time(self, choice: Choice, speeds: Sequence[float] | None) -> float:
        """Return a time that no schedule of a choice can beat: its computations, spread over all ranks evenly."""
        chain, own = self.chains[choice.microbatch], choice.layout.least(speeds)
        work = sum(each.total + each.forward * choice.recompute for each in chain.times)
        return choice.microbatches * work / (choice.layout.depth if own is None else sum(own))


def _words(choice: Choice) -> str:
    copies = "" if choice.layout.replicas == 1 else f"{choice.layout.replicas} pipelines of "
    return f"{copies}{choice.schedule}, {choice.microbatches} microbatches of {choice.microbatch}"


def _of_all_ranks(error: PipeError, layout: Layout) -> PipeError:
    """Return the error with the needs of all ranks, which are then comparable between layouts."""
    if layout.replicas == 1 or not isinstance(error, TooLittleMemoryError):
        return error
    return TooLittleMemoryError(str(error), [error.needs[layout.place(rank)] for rank in range(layout.ranks)])


def _cut_of(candidate: Candidate) -> _CandidateCut:
    plan = candidate.plan
    stages_of = tuple(tuple(held) for held in plan.placement.stages_of)
    return _CandidateCut(candidate.choice, candidate.cut.plan, stages_of, tuple(in_flight(plan)))


def _is_v(placement: Placement) -> bool:
    """Return True if the way through the ranks turns around at the last one."""
    ranks = placement.ranks
    return placement.stages == 2 * ranks and placement.rank_of[ranks] == ranks - 1 and ranks > 1


# Measured times of the best candidates.


def measure_best(
    ranking: Ranking,
    best: Sequence[_CandidateCut],
    measure: Callable[[_CandidateCut], dict[int, StageTimes] | str],
    group: dist.ProcessGroup | None,
) -> list[dict[int, StageTimes]]:
    """Return the times of the best cuts. Sizes of microbatches for which stages fail are dropped, and others tried."""
    known: dict[Choice, dict[int, StageTimes] | str] = {}
    while True:
        for each in best:
            if each.choice not in known:
                known[each.choice] = measure(each)
        found = [known[each.choice] for each in best]
        failed = {
            each.choice.microbatch: times for each, times in zip(best, found, strict=True) if isinstance(times, str)
        }
        if not failed:
            return [times for times in found if not isinstance(times, str)]
        best = on_first_rank(group, functools.partial(ranking.drop_sizes, failed))


def measure_cut(
    traced: TracedModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    progress: Callable[[str], None],
    candidate: _CandidateCut,
) -> dict[int, StageTimes] | str:
    """Return the times of every stage, or the reason why they do not run.

    All ranks of a group measure the stages that they would hold, at the same time; without a group this process
    measures all, rank by rank. In a group of several pipelines the times are the mean of the copies.
    """
    choice, ranks = candidate.choice, candidate.stages_of

    def prepare() -> Callable[[], dict[int, StageTimes]]:
        progress(f"running the stages of {choice.schedule}")
        pipe = cut_trace(traced, candidate.cut, Pipe)
        benchmark = StageBenchmark(pipe, args, kwargs, {"batch": choice.microbatch}, recompute=choice.recompute)
        if group is not None:
            return benchmark.prepare(ranks[dist.get_rank(group) % len(ranks)], candidate.in_flight)
        # One rank after the other, so that the copies of one are gone before those of the next are made.
        return lambda: {
            index: each for held in ranks for index, each in benchmark.prepare(held, candidate.in_flight)().items()
        }

    ready = on_each_rank(group, functools.partial(_attempt, prepare))
    found = on_all_ranks(group, functools.partial(_attempt, ready) if callable(ready) else lambda: ready)
    failures = [each for each in found if isinstance(each, str)]
    if failures:
        return f"the model does not run with {counted(choice.microbatch, 'sample')}: {failures[0]}"
    times = [each for each in found if not isinstance(each, str)]
    return {index: _mean([each[index] for each in times if index in each]) for held in ranks for index in held}


def _attempt(call: Callable[[], _T]) -> _T | str:
    """Return the result of a call, or the reason why a stage failed in it."""
    try:
        return call()
    except StageRunError as failure:
        return str(failure)


def _mean(copies: list[StageTimes]) -> StageTimes:
    full = statistics.fmean(copy.full_backward for copy in copies)
    return StageTimes(mean_of([copy.split for copy in copies]), full)
