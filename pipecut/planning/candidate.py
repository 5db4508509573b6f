"""Candidates: a choice, cut and simulated, with the time of a step and the memory of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import PipeError, PlanError, TooLittleMemoryError
from ..schedule import Costs, Link, Op, Plan, Report, simulate
from ..split import (
    Array,
    BalancedCut,
    CutCosts,
    Machine,
    Ranks,
    StageCost,
    balanced_cut,
    evaluate_cuts,
    least_memory_cuts,
)
from ..text import format_bytes, format_bytes_rounded_up
from .choices import Choice, in_flight
from .costs import StageCosts, bounds_of, pending_bytes, simulate_step, split_times, with_sums_of
from .measure import StageTimes
from .replicas import with_collectives

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
    def collectives(self) -> float:
        """Return the part of the step that the rank with the most collectives over copies spends in them."""
        if self.choice.layout.replicas == 1:
            return 0.0
        times = self.report.costs.collective_times(self.plan)
        both = [sum(each[stage] for each in times.values()) for stage in range(self.plan.stages)]
        return max(sum(both[stage] for stage in held) for held in self.plan.placement.stages_of) / self.report.makespan

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of its cuts."""
        return tuple(cut.label for cut in self.cut.plan.cuts)

    def with_plan(self, plan: Plan) -> Candidate:
        """Return the same cut under another plan."""
        return replace(self, report=simulate(with_sums_of(self.plan, plan), self.report.costs), searched=True)

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
    choice: Choice, stages: StageCosts, speeds: Sequence[float] | None, limits: Sequence[float] | None
) -> Candidate:
    """Cut for a choice, and simulate. The stages have the costs of one microbatch of its size.

    The cut of least memory decides if it fits, so that a choice that fits also fits more memory. Speeds and limits are
    those of the ranks of one pipeline.
    """
    maker = _CandidateMaker(choice, stages, choice.plan(), speeds)
    free = maker.free()
    if limits is None or _fits(free.memory, limits):
        return free
    least = _least_memory_cut(maker.memory, limits, stages.cuts_of(free.cut.plan))
    needs = maker.memory.needs(least)
    if not _fits(needs, limits):
        raise TooLittleMemoryError(f"needs {_needed(needs, limits)}", needs)
    found = maker.within(limits) or maker.cut_at(_faster_cut(maker.memory, limits, speeds, least))
    return min(found, maker.cut_at(least), key=lambda each: each.step_time)


class _CandidateMaker:
    """Makes the candidates of one choice."""

    def __init__(self, choice: Choice, stages: StageCosts, plan: Plan, speeds: Sequence[float] | None) -> None:
        self.choice, self.stages, self.plan, self.speeds = choice, stages, plan, speeds
        self.rank_of, self.flying = list(plan.placement.rank_of), in_flight(plan)
        self.memory = _RankMemory(plan, stages)

    def free(self) -> Candidate:
        """Return the balanced cut without limits, which is the same for all schedules that place stages alike."""
        key = tuple(self.rank_of), None if self.speeds is None else tuple(self.speeds)
        if key not in self.stages.free_cuts:
            self.stages.free_cuts[key] = balanced_cut(self.stages.chain, self.rank_of, speeds=self.speeds)
        return self._simulated(self.stages.free_cuts[key])

    def balanced(self, limits: Sequence[float]) -> Candidate:
        """Return the balanced cut, under limits of the memory that adds up over blocks."""
        options = {"speeds": self.speeds, "memory_limit": limits, "in_flight": self.flying}
        return self._simulated(balanced_cut(self.stages.balanced_chain, self.rank_of, **options))  # type: ignore[arg-type]

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
        each = [self.stages.cost(*bound) for bound in bounds]
        held = [self.stages.holds(*bound) for bound in bounds]
        costs = _costs_of(each, held, speed_of, self.stages.chain.machine)
        layout = self.choice.layout
        costs = with_collectives(costs, each, layout, self.stages.machine)
        report = simulate_step(self.plan, costs, self.stages.chain.ties(cuts), copied=layout.replicas > 1)
        return Candidate(self.choice, cut, report, self.memory.constant(cuts))


def _fits(needs: Sequence[float], limits: Sequence[float]) -> bool:
    return all(need <= limit for need, limit in zip(needs, limits, strict=True))


def _needed(needs: Sequence[float], limits: Sequence[float]) -> str:
    rank = max(range(len(needs)), key=lambda rank: needs[rank] / limits[rank])
    return f"{format_bytes_rounded_up(needs[rank])} on rank {rank}"


def _costs_of(stages: Sequence[StageCost], at_once: Sequence[bool], speeds: Sequence[float], machine: Machine) -> Costs:
    """Return the costs of stages as the simulator takes them: seconds and bytes.

    Where they come `at_once`, the first half of a split backward makes the weight gradients too, and adds them to the
    sums. If they are deferred, their operands stay in memory in between.
    """
    times = [split_times(*each) for each in zip(stages, at_once, strict=True)]
    pending = [pending_bytes(*each) for each in zip(stages, at_once, strict=True)]
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


# Peak memory of each rank under a schedule, for any cut, as the simulator would find it; and cuts that fit.

# Changes by a computation of a stage's microbatches in flight, and of those between the halves of a backward.
_CHANGES = {
    Op.FORWARD: (1, 0),
    Op.BACKWARD_INPUT: (-1, 1),
    Op.FULL_BACKWARD: (-1, 0),
    Op.BACKWARD_WEIGHT: (0, -1),
}


class _RankMemory:
    """Memory of each rank, from the microbatches that its stages hold at any moment of a schedule."""

    def __init__(self, plan: Plan, stages: StageCosts) -> None:
        self.plan, self.stages = plan, stages
        self._moments = [_moments(plan, rank) for rank in range(plan.ranks)]

    def constant(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """Return the bytes of each rank that do not depend on the microbatches in flight."""
        each = [self.stages.memory(*bound) for bound in bounds_of(cuts, self.stages.blocks.count)]
        return tuple(
            sum(each[stage].constant for stage in held) + max(each[stage].transient for stage in held)
            for held in self.plan.placement.stages_of
        )

    def needs(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """Return the peak bytes of each rank."""
        bounds = bounds_of(cuts, self.stages.blocks.count)
        found = []
        for constant, moments, held in zip(
            self.constant(cuts), self._moments, self.plan.placement.stages_of, strict=True
        ):
            sizes = [self.stages.memory(*bounds[stage]).saved for stage in held]
            if moments.shape[1] > len(held):
                sizes += [self.stages.pending(*bounds[stage]) for stage in held]
            found.append(constant + float((moments @ np.array(sizes)).max()))
        return tuple(found)


def _moments(plan: Plan, rank: int) -> Array:
    """Return the microbatches in flight in each stage of a rank, and the pending ones if there are any, by moment.

    A forward adds at its start, a backward frees at its end; the parts of an overlap start together.
    """
    held = plan.placement.stages_of[rank]
    column = {stage: number for number, stage in enumerate(held)}
    now, seen = [0] * (2 * len(held)), set()
    for action in plan.actions[rank]:
        leaves = [leaf for leaf in (() if action is None else action.leaves) if leaf.op in _CHANGES]
        for leaf in sorted(leaves, key=lambda leaf: _CHANGES[leaf.op], reverse=True):  # freed at the end
            flying, pending = _CHANGES[leaf.op]
            now[column[leaf.stage]] += flying
            now[column[leaf.stage] + len(held)] += pending
            if flying > 0 or pending > 0:
                seen.add(tuple(now))
    moments = np.array(sorted(seen), dtype=np.float64)
    return moments if moments[:, len(held) :].any() else moments[:, : len(held)]


# Cuts by the memory of ranks.
#
# The balance knows costs that add up over blocks. Gradients that an operation's backward makes, recomputed activations
# and deferred weight gradients depend on the whole stage. So from the cuts of the balance, one cut or some neighbours
# are moved at a time, as long as that makes it better.

_Quality = list[float]
_MAX_MOVES = 1000


def _least_memory_cut(memory: _RankMemory, limits: Sequence[float], start: Sequence[int]) -> list[int]:
    """Return the cut whose ranks use the least part of their limits; only the proportions of the limits matter.

    So a choice that fits some memory fits any larger one. `start` is a cut to begin with, beside the balance's.
    """
    rank_of, flying = list(memory.plan.placement.rank_of), in_flight(memory.plan)
    by_balance = least_memory_cuts(memory.stages.blocks, Ranks.of(rank_of, None, limits, flying)).cuts

    def shares(cuts: Sequence[int]) -> _Quality:
        return sorted((need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True)), reverse=True)

    count = memory.stages.blocks.count
    return min((_hill_climb(each, count, shares) for each in (by_balance, start)), key=shares)


def _faster_cut(
    memory: _RankMemory, limits: Sequence[float], speeds: Sequence[float] | None, start: Sequence[int]
) -> list[int]:
    """Return a cut with shorter loads that fits, from one that fits."""
    costs = CutCosts(memory.stages.blocks, Ranks.of(list(memory.plan.placement.rank_of), speeds))

    def loads(cuts: Sequence[int]) -> _Quality:
        over = max(need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True))
        return [max(1.0, over), *sorted(costs.loads(list(cuts)), reverse=True)]

    return _hill_climb(start, memory.stages.blocks.count, loads)


def _hill_climb(start: Sequence[int], count: int, quality: Callable[[Sequence[int]], _Quality]) -> list[int]:
    """Make moves that improve the quality, until there is none or _MAX_MOVES were tried."""
    best, least, tried = list(start), quality(start), 0
    improved = True
    while improved and tried < _MAX_MOVES:
        improved = False
        for moved in _moves(best, count):
            tried += 1
            found = quality(moved)
            if _is_less(found, least):
                best, least, improved = moved, found, True
                break
    return best


def _is_less(one: _Quality, other: _Quality) -> bool:
    """Compare by the first number that differs by more than rounding."""
    for left, right in zip(one, other, strict=True):
        if abs(left - right) > 1e-9 * max(abs(left), abs(right)):
            return left < right
    return False


def _moves(cuts: Sequence[int], count: int) -> Iterator[list[int]]:
    """Yield cuts of which one, or some neighbours together, are moved by 1, 2, 4... blocks."""
    for length in range(len(cuts)):
        for first in range(len(cuts) - length):
            last = first + length
            before = cuts[first - 1] if first else 0
            after = cuts[last + 1] if last + 1 < len(cuts) else count
            for step in _steps(before + 1 - cuts[first], after - 1 - cuts[last]):
                yield [*cuts[:first], *(cut + step for cut in cuts[first : last + 1]), *cuts[last + 1 :]]


def _steps(low: int, high: int) -> Iterator[int]:
    """Yield powers of two of both signs, within bounds.

    >>> list(_steps(-3, 4))
    [-1, 1, -2, 2, 4]
    """
    size = 1
    while size <= max(-low, high):
        yield from (step for step in (-size, size) if low <= step <= high)
        size *= 2
