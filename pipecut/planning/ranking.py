"""All choices, cut and simulated, from the fastest to the slowest; and why those that lost did."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import PipeError, PlanError, SplitError
from ..measurement.rehearsal import StageTimes
from ..schedule.auto.search import search_schedule
from ..schedule.placement import Placement
from ..schedule.report import Report
from ..split.automatic import giant_in
from ..split.balance import TooLittleMemoryError
from ..split.chain import Chain
from ..split.points import SplitPlan
from .candidate import Candidate, make_candidate
from .choices import Choice, in_flight
from .runnable import nothing_runs
from .shortage import nothing_fits
from .stages import Stages
from .training_plan import Alternative

BEST = 3  # cuts whose stages are run if costs are measured, and for which a schedule of their own is searched


@dataclass(frozen=True)
class Audition:
    """A cut whose stages are to be run: where it is, what each rank holds, and how."""

    choice: Choice
    cut: SplitPlan
    stages_of: tuple[tuple[int, ...], ...]
    in_flight: tuple[float, ...]


@dataclass(frozen=True)
class Winner:
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

    def find(self) -> list[Audition]:
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
        return [_audition(each) for each in self.candidates[:BEST]]

    def without(self, failed: Mapping[int, str]) -> list[Audition]:
        """The best ones without those of some sizes of microbatches, with which stages were seen to fail."""
        gone = [each for each in self.candidates if each.choice.microbatch in failed]
        self.alternatives += [Alternative.of(each, failed[each.choice.microbatch]) for each in gone]
        self.candidates = [each for each in self.candidates if each.choice.microbatch not in failed]
        if not self.candidates:
            raise nothing_runs(failed.values())
        return [_audition(each) for each in self.candidates[:BEST]]

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

    def winner(self, time_budget: float) -> Winner:
        """The best, after a search for schedules that are made for the best few cuts."""
        best = self._with_searched_schedules(time_budget)
        slower = [
            Alternative.of(each, f"{each.step_time / best.step_time - 1:.1%} slower")
            for each in self.candidates
            if each is not best
        ]
        found = sorted([*self.alternatives, *slower], key=lambda each: each.step_time or float("inf"))
        said = best.cut.words, giant_in(best.cut)
        return Winner(best.choice, best.labels, best.report, best.memory, tuple(found), *said)

    def _with_searched_schedules(self, time_budget: float) -> Candidate:
        best = self.candidates[0]
        begin = time.monotonic()
        for candidate in self.candidates[:BEST]:
            left = time_budget - (time.monotonic() - begin)
            if left <= 0:
                break
            self.tell(f"searching a schedule for the cut of {candidate.choice.schedule}")
            searched = self._searched(candidate, left / BEST)
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


def _audition(candidate: Candidate) -> Audition:
    plan = candidate.plan
    stages_of = tuple(tuple(held) for held in plan.placement.stages_of)
    return Audition(candidate.choice, candidate.cut.plan, stages_of, tuple(in_flight(plan)))


def _is_v(placement: Placement) -> bool:
    """Whether the way through the ranks turns around at the last one."""
    ranks = placement.ranks
    return placement.stages == 2 * ranks and placement.rank_of[ranks] == ranks - 1 and ranks > 1

