"""One choice, cut and simulated: how long a step takes, and how much memory each rank needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..measurement.rehearsal import StageTimes
from ..schedule.costs import Costs
from ..schedule.link import Link
from ..schedule.plan import Plan
from ..schedule.report import Report
from ..schedule.simulate import simulate
from ..split.automatic import BalancedCut, balanced_cut
from ..split.balance import TooLittleMemoryError
from ..split.chain import Chain, StageCost
from ..split.costs.machine import Machine
from .choices import Choice, in_flight
from .deferral import pending_bytes, split_times, stages_that_hold
from .tied import simulate_tied, tied_like

ROUNDS = 4


@dataclass(frozen=True)
class Candidate:
    """What comes of a choice. `kept` and `activations` are bytes by rank: those that stay, and those in flight."""

    choice: Choice
    cut: BalancedCut
    report: Report
    kept: tuple[float, ...]
    searched: bool = False
    off: float = 1.0  # how much longer than estimated the stages of others took that were run

    @property
    def plan(self) -> Plan:
        return self.report.plan

    @property
    def step_time(self) -> float:
        """Seconds."""
        return self.report.makespan * self.off

    @property
    def memory(self) -> tuple[float, ...]:
        """The most that each rank needs, in bytes."""
        return tuple(kept + flying for kept, flying in zip(self.kept, self.report.peak_memory, strict=True))

    @property
    def labels(self) -> tuple[str, ...]:
        """Where it is cut, in words."""
        return tuple(cut.label for cut in self.cut.plan.cuts)

    def with_plan(self, plan: Plan) -> Candidate:
        """The same cut under another plan."""
        return replace(self, report=simulate(tied_like(self.plan, plan), self.report.costs), searched=True)

    def with_times(self, times: Mapping[int, StageTimes], speeds: Sequence[float]) -> Candidate:
        """The same with the times that its stages were seen to take."""
        each = [times[stage] for stage in range(self.plan.stages)]
        costs = replace(
            self.report.costs,
            forward=[seen.split.forward / speed for seen, speed in zip(each, speeds, strict=True)],
            backward_input=[seen.split.backward_input / speed for seen, speed in zip(each, speeds, strict=True)],
            backward_weight=[seen.split.backward_weight / speed for seen, speed in zip(each, speeds, strict=True)],
            full_backward=[seen.full_backward / speed for seen, speed in zip(each, speeds, strict=True)],
        )
        return replace(self, report=simulate(self.plan, costs))


def make_candidate(
    choice: Choice,
    chain: Chain,
    ranks: int,
    speeds: Sequence[float] | None,
    limits: Sequence[float] | None,
) -> Candidate:
    """Cut for a choice, and simulate. The chain has the costs of one microbatch of its size.

    Some memory is there for a while only: gradients that an operation's backward makes, and the activations of one
    microbatch if they are computed again. How much that is follows from the cut, so that a cut which is too large is
    made again with less memory.
    """
    room = limits
    for _ in range(ROUNDS):
        try:
            found = _cut_once(choice, chain, ranks, speeds, room)
        except TooLittleMemoryError as error:
            assert room is not None  # by construction: without limits nothing is too large
            needed = _needed(choice, chain, ranks, speeds, room, error.needed)
            raise TooLittleMemoryError(str(error), needed) from error
        if limits is None or room is None:
            break
        over = [max(0.0, needed - limit) for needed, limit in zip(found.memory, limits, strict=True)]
        if not any(over):
            break
        room = [max(1.0, left - more) for left, more in zip(room, over, strict=True)]
    return found


def _needed(
    choice: Choice,
    chain: Chain,
    ranks: int,
    speeds: Sequence[float] | None,
    room: Sequence[float],
    least: float,
) -> float:
    """What a rank needs in all, with what is there for a while only, if the rest of it needs the least."""
    factor = least / max(room) * (1 + 1e-6)
    return max(_cut_once(choice, chain, ranks, speeds, [limit * factor for limit in room]).memory)


def _cut_once(
    choice: Choice, chain: Chain, ranks: int, speeds: Sequence[float] | None, limits: Sequence[float] | None
) -> Candidate:
    plan = choice.plan(ranks)
    flying = in_flight(plan)
    seen = _recomputing(chain) if choice.recompute else chain
    cut = balanced_cut(seen, list(plan.placement.rank_of), speeds=speeds, memory_limit=limits, in_flight=flying)
    stages = cut.chain.stage_costs(cut.balance.cuts)
    kept = [
        total - sum(flying[stage] * stages[stage].saved_bytes for stage in held)
        for total, held in zip(cut.balance.memory, plan.placement.stages_of, strict=True)
    ]
    if choice.recompute:  # while one microbatch goes backward, its activations are all there
        whole = _activations(chain, cut)
        kept = [
            size + max(whole[stage] for stage in held)
            for size, held in zip(kept, plan.placement.stages_of, strict=True)
        ]
        stages = tuple(replace(stage, saved_bytes=stage.received + stage.sent) for stage in stages)
    speed_of = [1.0 if speeds is None else speeds[rank] for rank in plan.placement.rank_of]
    held = stages_that_hold(cut.chain, cut.balance.cuts)
    if choice.recompute:  # what is computed again is not there any more when the second half would need it
        held = [stage.times.backward_input > 0 for stage in stages]
    costs = costs_of(stages, held, speed_of, chain.machine)
    working = [max(stages[stage].working_bytes for stage in held) for held in plan.placement.stages_of]
    kept = [size + more for size, more in zip(kept, working, strict=True)]
    report = simulate_tied(plan, costs, cut.chain.ties(cut.balance.cuts))
    return Candidate(choice, cut, report, tuple(kept))


def _activations(chain: Chain, cut: BalancedCut) -> list[float]:
    """The bytes that each stage of a cut keeps if nothing is computed again."""
    numbers = {place.cut.tick: number for number, place in enumerate(chain.places, 1)}
    again = chain.stage_costs([numbers[each.tick] for each in cut.plan.cuts])
    return [stage.saved_bytes for stage in again]


def costs_of(stages: Sequence[StageCost], held: Sequence[bool], speeds: Sequence[float], machine: Machine) -> Costs:
    """The costs of stages as the simulator takes them: seconds and bytes.

    Where gradients are `held`, the first half of a split backward makes those of the weights too; the second half adds
    them to the sums. Where they are put off, what they will be made of stays in between.
    """
    times = [split_times(stage, holds, machine) for stage, holds in zip(stages, held, strict=True)]
    kept = [pending_bytes(stage, holds) for stage, holds in zip(stages, held, strict=True)]
    return Costs(
        forward=[each.forward / speed for each, speed in zip(times, speeds, strict=True)],
        backward_input=[each.backward_input / speed for each, speed in zip(times, speeds, strict=True)],
        backward_weight=[each.backward_weight / speed for each, speed in zip(times, speeds, strict=True)],
        transfer=Link(machine.link_latency, machine.link_bandwidth),
        message_bytes={(index, index + 1): stage.sent for index, stage in enumerate(stages[:-1])},
        memory_forward=[stage.saved_bytes for stage in stages],
        memory_backward_input=[size - stage.saved_bytes for stage, size in zip(stages, kept, strict=True)],
        memory_backward_weight=[-size for size in kept],
    )


def _recomputing(chain: Chain) -> Chain:
    """Blocks run their forward again before their backward; a stage keeps what it receives, wherever it begins."""
    times = [replace(each, backward_input=each.backward_input + each.forward) for each in chain.times]
    shared = tuple(replace(item, saved=0.0) for item in chain.shared)
    return replace(chain, times=tuple(times), saved=(0.0,) * len(chain.saved), shared=shared)
