"""The model as a chain of blocks with the costs of one microbatch, for each size of microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import InputError
from ..pipe_ir import Operation, TracedModel
from ..schedule import Costs, Dataflow, Plan, Report, add_reduce_ties, simulate
from ..split import (
    ACCUMULATION_PASSES,
    TRAINED_MEMORY_FACTOR,
    Blocks,
    Chain,
    ConcreteCosts,
    Machine,
    SplitPlan,
    StageCost,
    StageTie,
    Times,
    chain_of,
    changed_state,
    mean_of,
    operations_of,
)
from ..stage import PipelineStage, max_rows, min_rows_to_defer, weight_sizes
from .group import on_all_ranks, on_each_rank
from .measure import measure_link
from .measured_chain import measured_chain


@dataclass(frozen=True)
class Pricing:
    """How costs are found. In a group all ranks measure at once, as they will compute at once, and take the mean."""

    machine: Machine | None
    measured: bool
    ranks: int
    group: dist.ProcessGroup | None

    def machine_of(self, traced: TracedModel) -> Machine:
        """What was given, or this machine; with the link between the ranks of a group."""
        if self.machine is not None:
            return self.machine
        group = self.group
        found = on_each_rank(group, lambda: _measured_machine(traced))
        if group is None:
            return found
        links = [link for link in on_all_ranks(group, lambda: measure_link(group, _device(group, traced))) if link]
        if not links:
            return found
        latency, bandwidth = (sum(values) / len(links) for values in zip(*links, strict=True))
        return replace(found, link_latency=latency, link_bandwidth=bandwidth)

    def chains(
        self,
        traced: TracedModel,
        sizes: Sequence[int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> dict[int, Chain]:
        """The chains, by size."""
        machine = self.machine_of(traced)

        def computed() -> tuple[Chain, dict[int, Chain]]:
            by_size = {size: chain_of(traced, machine, {**traced.hints, "batch": size}) for size in sizes}
            return chain_of(traced, machine), by_size

        example, chains = on_each_rank(self.group, computed)
        if not self.measured:
            return chains

        def times() -> list[Times]:
            tell("measuring the parts of the model")
            return list(measured_chain(example, args, kwargs, stages=2 * self.ranks).times)

        found = on_all_ranks(self.group, times)
        seen = [mean_of(copies) for copies in zip(*found, strict=True)]
        # Other sizes than the example's are computed, each block as much off as it was at the example's.
        return {
            size: chain.with_times([_scaled(*each) for each in zip(chain.times, seen, example.times, strict=True)])
            for size, chain in chains.items()
        }


def _measured_machine(traced: TracedModel) -> Machine:
    return Machine.measure(traced.device, {parameter.dtype for parameter in traced.model.parameters()})


def _scaled(times: Times, seen: Times, said: Times) -> Times:
    """Times that are as much off as what was said is from what was seen."""
    return times.scaled(
        _ratio(seen.forward, said.forward),
        _ratio(seen.backward_input, said.backward_input),
        _ratio(seen.backward_weight, said.backward_weight),
    )


def _ratio(seen: float, said: float) -> float:
    return seen / said if said else 1.0


def _device(group: dist.ProcessGroup, traced: TracedModel) -> torch.device:
    """Where messages of the group are: a backend for accelerators takes none from the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return traced.device if traced.device.type == accelerator.type else accelerator


# MERGED: What a split backward does in each stage: put weight gradients off, or make them at once and hold them.


class DeferralRule:
    """Whether a stage makes all gradients at once: what it has to gain is little, by the rule that stages go by."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._weigh = ConcreteCosts(chain.traced, chain.sizes)
        self._known: dict[tuple[int, int], bool] = {}

    def holds(self, begin: int, end: int) -> bool:
        """The answer for a run of blocks."""
        if (begin, end) not in self._known:
            self._known[begin, end] = self._answer(begin, end)
        return self._known[begin, end]

    def _answer(self, begin: int, end: int) -> bool:
        inside = operations_of(self.chain, begin, end)
        own = {op.index for op in inside}
        used = [self.chain.traced.operations[index] for index in {ref for op in inside for ref in op.refs} - own]
        trained = [op for op in used if op.spec is not None and op.spec.requires_grad]
        arriving = [self._empty(op) for op in trained if op.kind != "state"]
        on_cpu = self.chain.traced.device.type == "cpu"
        least = min_rows_to_defer(weight_sizes(self._empty(op) for op in trained if op.kind == "state"), on_cpu)
        return bool(arriving) and max_rows(arriving) < least

    def _empty(self, op: Operation) -> Tensor:
        shape = () if op.spec is None else [int(self._weigh.number(dim)) for dim in op.spec.shape]
        return torch.empty(shape, device="meta")


def split_times(stage: StageCost, holds: bool, machine: Machine) -> Times:
    """The times of a stage by the halves of its backward."""
    if not holds:
        return stage.times
    adding = min(stage.times.backward_weight, ACCUMULATION_PASSES * stage.trained_bytes / machine.memory_bandwidth)
    moved = stage.times.backward_weight - adding
    return Times(stage.times.forward, stage.times.backward_input + moved, adding)


def pending_bytes(stage: StageCost, holds: bool) -> float:
    """What one microbatch keeps between the halves of its backward."""
    if holds:
        return stage.trained_bytes
    # Where no input needs a gradient, the first half does nothing.
    return stage.deferred_bytes if stage.times.backward_input else stage.saved_bytes


# MERGED: What the stages of a model cost, one by one, and how much memory they need; remembered, as many choices ask.


@dataclass(frozen=True)
class _StageMemory:
    """Bytes of a stage: all the time, while one microbatch goes backward, and of each microbatch in flight."""

    kept: float
    passing: float
    saved: float


class Stages:
    """The stages that a chain may be cut into, as runs of its blocks, with activations computed again or not."""

    def __init__(self, chain: Chain, recompute: bool) -> None:
        self.recompute = recompute
        self.chain = _recomputing(chain) if recompute else chain
        self._whole = chain
        self._costs: dict[tuple[int, int], StageCost] = {}
        self._memory: dict[tuple[int, int], _StageMemory] = {}

    @cached_property
    def blocks(self) -> Blocks:
        """The chain as plain numbers."""
        return self.chain.blocks()

    @cached_property
    def _rule(self) -> DeferralRule:
        return DeferralRule(self.chain)

    def cuts_of(self, plan: SplitPlan) -> list[int]:
        """The cuts of a model as numbers of blocks of the whole chain."""
        numbers = {place.cut.tick: number for number, place in enumerate(self.chain.places, 1)}
        return [numbers[cut.tick] for cut in plan.cuts]

    def cost(self, begin: int, end: int) -> StageCost:
        """The costs of a stage; one that computes again keeps what it receives and sends."""
        if (begin, end) not in self._costs:
            stage = _one_stage(self.chain, begin, end)
            if self.recompute:
                stage = replace(stage, saved_bytes=stage.received + stage.sent)
            self._costs[begin, end] = stage
        return self._costs[begin, end]

    def holds(self, begin: int, end: int) -> bool:
        """Whether the first half of a split backward makes all gradients."""
        if self.recompute:  # what is computed again is not there any more when the second half would need it
            return self.cost(begin, end).times.backward_input > 0
        return self._rule.holds(begin, end)

    def memory(self, begin: int, end: int) -> _StageMemory:
        """The memory of a stage."""
        if (begin, end) not in self._memory:
            stage = self.cost(begin, end)
            # While one microbatch goes backward, the activations that are computed again are all there.
            again = _one_stage(self._whole, begin, end).saved_bytes if self.recompute else 0.0
            self._memory[begin, end] = _StageMemory(
                stage.parameter_bytes + (TRAINED_MEMORY_FACTOR - 1) * stage.trained_bytes + stage.buffer_bytes,
                stage.working_bytes + again,
                stage.saved_bytes,
            )
        return self._memory[begin, end]

    def pending(self, begin: int, end: int) -> float:
        """The bytes of a microbatch between the halves of its backward."""
        return pending_bytes(self.cost(begin, end), self.holds(begin, end))


def bounds_of(cuts: Sequence[int], blocks: int) -> list[tuple[int, int]]:
    """Where each stage begins and ends.

    >>> bounds_of([2, 3], 5)
    [(0, 2), (2, 3), (3, 5)]
    """
    return list(zip([0, *cuts], [*cuts, blocks], strict=True))


def _one_stage(chain: Chain, begin: int, end: int) -> StageCost:
    cuts = [bound for bound in (begin, end) if 0 < bound < len(chain.times)]
    return chain.stage_costs(cuts)[1 if begin else 0]


def _recomputing(chain: Chain) -> Chain:
    """Blocks run their forward again before their backward; a stage keeps what it receives, wherever it begins."""
    times = [replace(each, backward_input=each.backward_input + each.forward) for each in chain.times]
    shared = tuple(replace(item, saved=0.0) for item in chain.shared)
    return replace(chain, times=tuple(times), saved=(0.0,) * len(chain.saved), shared=shared)


# MERGED: What ties between stages add to a step: the sums of their gradients, at its end.


def simulate_tied(plan: Plan, costs: Costs, ties: Sequence[StageTie]) -> Report:
    """A plan simulated with the sums of ties.

    The cut is chosen without them: whichever cut parts the users of a parameter pays the same sum, once a step.
    """
    tied = plan.with_dataflow(Dataflow.chain(plan.stages, ties=[tie.stages for tie in ties]))
    return simulate(add_reduce_ties(tied), replace(costs, tie_bytes=[tie.gradient_bytes for tie in ties]))


def tied_like(plan: Plan, other: Plan) -> Plan:
    """Another plan of the same stages, with the sums of the first one."""
    return add_reduce_ties(other.with_dataflow(plan.dataflow))


# MERGED: Stages that keep only what they receive, and compute their activations again for the backward.


def check_runs_twice(traced: TracedModel) -> None:
    """Refuse a model whose forward changes its state: it may have been planned in another mode."""
    changed = sorted(changed_state(traced))
    if changed:
        raise InputError(
            f"this plan computes activations again, and the forward of the model, in its mode of now, changes "
            f"{changed[0]!r}: it would be changed twice; put the model in evaluation mode, or make the plan again "
            "with the model in the mode in which it trains"
        )


def checkpoint_stage(stage: PipelineStage) -> None:
    """Let a stage's module run under a checkpoint; its names stay as they are."""
    module = stage.submod
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
