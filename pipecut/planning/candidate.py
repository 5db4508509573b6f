"""Candidates: a choice, cut and simulated, with the time of a step and the memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import PipeError, PlanError, TooLittleMemoryError
from ..schedule import Costs, Link, Plan, Report, simulate
from ..split import BalancedCut, Machine, StageCost, balanced_cut, evaluate_cuts
from ..text import format_bytes, format_bytes_rounded_up
from .choices import Choice, in_flight
from .costs import StageCosts, bounds_of, pending_bytes, simulate_tied, split_times, tied_like
from .measure import StageTimes
from .memory import RankMemory, faster_cut, least_memory_cut

_ROUNDS = 4


@dataclass(frozen=True)
class Candidate:
    """A choice with its cut and its simulated step. `constant` are the bytes per rank that do not depend on time."""

    choice: Choice
    cut: BalancedCut
    report: Report
    constant: tuple[float, ...]
    searched: bool = False
    slowdown: float = 1.0  # ratio of measured to predicted time of candidates that were measured

    @property
    def plan(self) -> Plan:
        return self.report.plan

    @property
    def step_time(self) -> float:
        """Return the predicted seconds of a step."""
        return self.report.makespan * self.slowdown

    @property
    def memory(self) -> tuple[float, ...]:
        """Return the peak bytes of each rank."""
        return tuple(sum(both) for both in zip(self.constant, self.report.peak_memory, strict=True))

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of its cuts."""
        return tuple(cut.label for cut in self.cut.plan.cuts)

    def with_plan(self, plan: Plan) -> Candidate:
        """Return the same cut under another plan."""
        return replace(self, report=simulate(tied_like(self.plan, plan), self.report.costs), searched=True)

    def with_times(self, times: Mapping[int, StageTimes], speeds: Sequence[float]) -> Candidate:
        """Return the same with the measured times of its stages."""
        stages = [(times[stage], speed) for stage, speed in enumerate(speeds)]
        costs = replace(
            self.report.costs,
            forward=[measured.split.forward / speed for measured, speed in stages],
            backward_input=[measured.split.backward_input / speed for measured, speed in stages],
            backward_weight=[measured.split.backward_weight / speed for measured, speed in stages],
            full_backward=[measured.full_backward / speed for measured, speed in stages],
        )
        return replace(self, report=simulate(self.plan, costs))


def make_candidate(
    choice: Choice, stages: StageCosts, ranks: int, speeds: Sequence[float] | None, limits: Sequence[float] | None
) -> Candidate:
    """Cut for a choice, and simulate. The stages have the costs of one microbatch of its size.

    The cut of least memory decides if it fits, so that a choice that fits also fits more memory.
    """
    maker = _CandidateMaker(choice, stages, choice.plan(ranks), speeds)
    free = maker.balanced(None)
    if limits is None or _fits(free.memory, limits):
        return free
    least = least_memory_cut(maker.memory, limits, stages.cuts_of(free.cut.plan))
    needs = maker.memory.needs(least)
    if not _fits(needs, limits):
        raise TooLittleMemoryError(f"needs {_needed(needs, limits)}", needs)
    found = maker.within(limits) or maker.cut_at(faster_cut(maker.memory, limits, speeds, least))
    return min(found, maker.cut_at(least), key=lambda each: each.step_time)


class _CandidateMaker:
    """Makes the candidates of one choice."""

    def __init__(self, choice: Choice, stages: StageCosts, plan: Plan, speeds: Sequence[float] | None) -> None:
        self.choice, self.stages, self.plan, self.speeds = choice, stages, plan, speeds
        self.rank_of, self.flying = list(plan.placement.rank_of), in_flight(plan)
        self.memory = RankMemory(plan, stages)

    def balanced(self, limits: Sequence[float] | None) -> Candidate:
        """Return the balanced cut, under limits of the memory that adds up over blocks."""
        options = {"speeds": self.speeds, "memory_limit": limits, "in_flight": self.flying}
        return self._simulated(balanced_cut(self.stages.chain, self.rank_of, **options))  # type: ignore[arg-type]

    def cut_at(self, cuts: Sequence[int]) -> Candidate:
        """Return the cut at some blocks."""
        chain = self.stages.chain
        found = evaluate_cuts(self.stages.blocks, cuts, self.rank_of, speeds=self.speeds, in_flight=self.flying)
        return self._simulated(BalancedCut(chain.plan(cuts), found, chain))

    def within(self, limits: Sequence[float]) -> Candidate | None:
        """Return a balanced cut that fits in all, or None. One that does not fit is made again with less memory."""
        room = limits
        for _ in range(_ROUNDS):
            try:
                found = self.balanced(room)
            except TooLittleMemoryError:
                return None
            if _fits(found.memory, limits):
                return found
            over = [max(0.0, needed - limit) for needed, limit in zip(found.memory, limits, strict=True)]
            room = [max(1.0, left - more) for left, more in zip(room, over, strict=True)]
        return None

    def _simulated(self, cut: BalancedCut) -> Candidate:
        cuts = self.stages.cuts_of(cut.plan)
        bounds = bounds_of(cuts, self.stages.blocks.count)
        speed_of = [1.0 if self.speeds is None else self.speeds[rank] for rank in self.rank_of]
        costs = _costs_of(
            [self.stages.cost(*bound) for bound in bounds],
            [self.stages.holds(*bound) for bound in bounds],
            speed_of,
            self.stages.chain.machine,
        )
        report = simulate_tied(self.plan, costs, self.stages.chain.ties(cuts))
        return Candidate(self.choice, cut, report, self.memory.constant(cuts))


def _fits(needs: Sequence[float], limits: Sequence[float]) -> bool:
    return all(need <= limit for need, limit in zip(needs, limits, strict=True))


def _needed(needs: Sequence[float], limits: Sequence[float]) -> str:
    rank = max(range(len(needs)), key=lambda rank: needs[rank] / limits[rank])
    return f"{format_bytes_rounded_up(needs[rank])} on rank {rank}"


def _costs_of(stages: Sequence[StageCost], held: Sequence[bool], speeds: Sequence[float], machine: Machine) -> Costs:
    """Return the costs of stages as the simulator takes them: seconds and bytes.

    If gradients are `held`, the first half of a split backward makes those of the weights too, and the second half
    adds them to the sums. If they are deferred, their operands stay in memory in between.
    """
    times = [split_times(stage, holds, machine) for stage, holds in zip(stages, held, strict=True)]
    pending = [pending_bytes(stage, holds) for stage, holds in zip(stages, held, strict=True)]
    return Costs(
        forward=[each.forward / speed for each, speed in zip(times, speeds, strict=True)],
        backward_input=[each.backward_input / speed for each, speed in zip(times, speeds, strict=True)],
        backward_weight=[each.backward_weight / speed for each, speed in zip(times, speeds, strict=True)],
        transfer=Link(machine.link_latency, machine.link_bandwidth),
        message_bytes={(index, index + 1): stage.sent for index, stage in enumerate(stages[:-1])},
        memory_forward=[stage.saved_bytes for stage in stages],
        memory_backward_input=[size - stage.saved_bytes for stage, size in zip(stages, pending, strict=True)],
        memory_backward_weight=[-size for size in pending],
    )


def no_fit_error(problems: Sequence[PipeError], limits: Sequence[float] | None, remedies: Sequence[str]) -> PipeError:
    """Return the error if no choice fits the memory; `problems` has one for each choice."""
    too_little = [error.needs for error in problems if isinstance(error, TooLittleMemoryError)]
    if limits is None or not too_little:
        return problems[0]
    needs = min(too_little, key=lambda needs: max(need / limit for need, limit in zip(needs, limits, strict=True)))
    helps = f"Use {', or '.join(remedies)}."
    if len(set(limits)) == 1:
        return PlanError(
            f"Nothing fits memory={format_bytes(limits[0])} on each rank: the least that would do is about "
            f"{format_bytes_rounded_up(max(needs))}. {helps}"
        )
    given = ", ".join(map(format_bytes, limits))
    short = [
        f"rank {rank} has {format_bytes(limit)}, and needs about {format_bytes_rounded_up(need)} at the least"
        for rank, (need, limit) in enumerate(zip(needs, limits, strict=True))
        if need > limit
    ]
    return PlanError(f"Nothing fits memory=[{given}]: {'; '.join(short)}. {helps}")


def memory_remedies(choices: Sequence[Choice], may_recompute: bool) -> list[str]:
    """Return changes of the request that would need less memory."""
    found = ["more ranks"]
    if min(choice.microbatch for choice in choices) > 1:
        found.append("a smaller microbatch")
    if may_recompute and not any(choice.recompute for choice in choices):
        found.append("recompute='auto'")
    return found
