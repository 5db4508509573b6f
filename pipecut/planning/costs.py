"""Costs of one microbatch: of the blocks of a model, and of the stages that it may be cut into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..pipe_ir import Operation, TracedModel
from ..run import MAX_HELD
from ..schedule import (
    WHOLE_STAGE,
    Costs,
    Dataflow,
    Op,
    Plan,
    Report,
    add_reduce_grad,
    add_reduce_ties,
    add_unshard_reshard,
    drop_reduce_ties,
    simulate,
)
from ..split import (
    BalancedCut,
    Blocks,
    Chain,
    ConcreteCosts,
    Machine,
    SplitPlan,
    StageCost,
    StageTie,
    Times,
    chain_of,
    default_machine,
    mean_of,
    operations_of,
)
from ..stage import max_rows, min_rows_to_defer, weight_sizes
from .group import on_all_ranks, on_each_rank
from .measure import measure_link
from .measured_chain import measured_chain
from .replicas import Layout, chain_on, kept_bytes

# Balanced cuts without limits, by the rank of each stage and the speeds of ranks.
FreeCuts: TypeAlias = dict[tuple[tuple[int, ...], tuple[float, ...] | None], BalancedCut]


@dataclass(frozen=True)
class CostSource:
    """Finds the costs of blocks: analytic or measured.

    In a group all ranks measure at the same time, as they will compute at the same time, and take the mean.
    """

    machine: Machine | None
    measured: bool
    ranks: int
    group: dist.ProcessGroup | None

    def machine_of(self, traced: TracedModel) -> Machine:
        """Return the given machine, or this one as measured, with the link between the ranks of a group.

        A model on the meta device is on no machine that could be measured.
        """
        given = self.machine
        if given is None and any(parameter.is_meta for parameter in traced.model.parameters()):
            given = default_machine(traced)
        if given is not None:
            return given
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
        progress: Callable[[str], None],
    ) -> dict[int, Chain]:
        """Return the model as a chain of blocks, by the size of microbatches."""
        machine = self.machine_of(traced)

        def computed() -> tuple[Chain, dict[int, Chain]]:
            by_size = {size: chain_of(traced, machine, {**traced.hints, "batch": size}) for size in sizes}
            return chain_of(traced, machine), by_size

        example, chains = on_each_rank(self.group, computed)
        if not self.measured:
            return chains

        def times() -> list[Times]:
            progress("measuring the parts of the model")
            return list(measured_chain(example, args, kwargs, stages=2 * self.ranks).times)

        found = on_all_ranks(self.group, times)
        measured = [mean_of(copies) for copies in zip(*found, strict=True)]
        # Times of other sizes are analytic, corrected by the ratio of measured to analytic time at the example's size.
        return {
            size: chain.with_times(
                [_corrected(*each) for each in zip(chain.times, measured, example.times, strict=True)]
            )
            for size, chain in chains.items()
        }


def _measured_machine(traced: TracedModel) -> Machine:
    return Machine.measure(traced.device, {parameter.dtype for parameter in traced.model.parameters()})


def _corrected(times: Times, measured: Times, analytic: Times) -> Times:
    """Scale times by the ratio of measured to analytic times."""
    return times.scaled(
        _ratio(measured.forward, analytic.forward),
        _ratio(measured.backward_input, analytic.backward_input),
        _ratio(measured.backward_weight, analytic.backward_weight),
    )


def _ratio(measured: float, analytic: float) -> float:
    return measured / analytic if analytic else 1.0


def _device(group: dist.ProcessGroup, traced: TracedModel) -> torch.device:
    """Return the device of messages of the group: a backend for accelerators takes none from the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return traced.device if traced.device.type == accelerator.type else accelerator


class DeferralRule:
    """Decides for a stage if the first half of a split backward makes all gradients, by the rule that stages go by.

    It does if deferring weight gradients gains little.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._weigh = ConcreteCosts(chain.traced, chain.sizes)
        self._known: dict[tuple[int, int], bool] = {}

    def holds(self, begin: int, end: int) -> bool:
        """Return True if a stage of these blocks makes all gradients at once."""
        if (begin, end) not in self._known:
            self._known[begin, end] = self._decide(begin, end)
        return self._known[begin, end]

    def _decide(self, begin: int, end: int) -> bool:
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


def split_times(stage: StageCost, at_once: bool) -> Times:
    """Return the times of a stage, with its backward in halves, of which the first may be all of it."""
    times = stage.times
    return Times(times.forward, times.backward_input + times.backward_weight, 0.0) if at_once else times


def pending_bytes(stage: StageCost, at_once: bool) -> float:
    """Return the bytes that one microbatch keeps between the halves of its backward."""
    if at_once:
        return 0.0
    # Where no input needs a gradient, the first half does nothing.
    return stage.deferred_bytes if stage.times.backward_input else stage.saved_bytes


@dataclass(frozen=True)
class _StageMemory:
    """Bytes of a stage: at all times, while one microbatch goes backward, and per microbatch in flight."""

    constant: float
    transient: float
    saved: float


class StageCosts:
    """Costs and memory of the stages that a chain may be cut into, with recomputation or without; cached.

    `layout` has the copies of each stage. `free_cuts` are the balanced cuts without limits, which other layouts with
    the same links share.
    """

    def __init__(
        self, chain: Chain, recompute: bool, layout: Layout | None = None, free_cuts: FreeCuts | None = None
    ) -> None:
        self.recompute, self.layout, self.machine = recompute, layout or Layout(1), chain.machine
        chain = replace(chain, machine=self.layout.machine(self.machine))
        self.chain = _recomputing(chain) if recompute else chain
        self.balanced_chain = chain_on(self.chain, self.layout, self.machine)
        self.free_cuts = {} if free_cuts is None else free_cuts
        self._whole = chain
        self._costs: dict[tuple[int, int], StageCost] = {}
        self._memory: dict[tuple[int, int], _StageMemory] = {}

    @cached_property
    def blocks(self) -> Blocks:
        """Return the chain as plain numbers, with the memory of the layout."""
        return self.balanced_chain.blocks()

    @cached_property
    def _rule(self) -> DeferralRule:
        return DeferralRule(self.chain)

    def cuts_of(self, plan: SplitPlan) -> list[int]:
        """Return the cuts of a model as numbers of blocks."""
        numbers = {place.cut.tick: number for number, place in enumerate(self.chain.places, 1)}
        return [numbers[cut.tick] for cut in plan.cuts]

    def cost(self, begin: int, end: int) -> StageCost:
        """Return the costs of a stage; with recomputation it keeps only the values that it receives and sends."""
        if (begin, end) not in self._costs:
            stage = _one_stage(self.chain, begin, end)
            if self.recompute:
                stage = replace(stage, saved_bytes=stage.received + stage.sent)
            self._costs[begin, end] = stage
        return self._costs[begin, end]

    def holds(self, begin: int, end: int) -> bool:
        """Return True if the first half of a split backward makes all gradients."""
        if self.recompute:  # recomputed activations are gone when the second half would need them
            return self.cost(begin, end).times.backward_input > 0
        return self._rule.holds(begin, end)

    def memory(self, begin: int, end: int) -> _StageMemory:
        """Return the memory of a stage."""
        if (begin, end) not in self._memory:
            stage = self.cost(begin, end)
            # While one microbatch goes backward, all of its recomputed activations are in memory.
            again = _one_stage(self._whole, begin, end).saved_bytes if self.recompute else 0.0
            self._memory[begin, end] = _StageMemory(
                kept_bytes(stage, self.layout),
                stage.working_bytes + again,
                stage.saved_bytes,
            )
        return self._memory[begin, end]

    def pending(self, begin: int, end: int) -> float:
        """Return the bytes of a microbatch between the halves of its backward."""
        return pending_bytes(self.cost(begin, end), self.holds(begin, end))


def bounds_of(cuts: Sequence[int], blocks: int) -> list[tuple[int, int]]:
    """Return the begin and end of each stage.

    >>> bounds_of([2, 3], 5)
    [(0, 2), (2, 3), (3, 5)]
    """
    return list(zip([0, *cuts], [*cuts, blocks], strict=True))


def _one_stage(chain: Chain, begin: int, end: int) -> StageCost:
    cuts = [bound for bound in (begin, end) if 0 < bound < len(chain.times)]
    return chain.stage_costs(cuts)[1 if begin else 0]


def _recomputing(chain: Chain) -> Chain:
    """Return a chain whose blocks run their forward again before their backward, and save nothing."""
    times = [replace(each, backward_input=each.backward_input + each.forward) for each in chain.times]
    shared = tuple(replace(item, saved=0.0) for item in chain.shared)
    return replace(chain, times=tuple(times), saved=(0.0,) * len(chain.saved), shared=shared)


def simulate_step(plan: Plan, costs: Costs, ties: Sequence[StageTie], *, copied: bool) -> Report:
    """Simulate a plan with the sums of tied gradients at the end of the step, and the collectives of copied stages.

    The cut is chosen without the sums: every cut that parts the users of a parameter pays the same, once per step.
    """
    tied = plan.with_dataflow(Dataflow.chain(plan.stages, ties=[tie.stages for tie in ties]))
    return simulate(_with_sums(tied, copied), replace(costs, tie_bytes=[tie.gradient_bytes for tie in ties]))


def with_sums_of(plan: Plan, other: Plan) -> Plan:
    """Return another plan of the same stages, with the sums and collectives of the first one."""
    return _with_sums(other.with_dataflow(plan.dataflow), Op.REDUCE_GRAD in plan.ops)


def _with_sums(plan: Plan, copied: bool) -> Plan:
    """Add the actions that a schedule adds when it lowers the plan, all but the messages."""
    return add_reduce_ties(add_reduce_grad(add_unshard_reshard(plan, MAX_HELD)) if copied else plan)


def computations_of(plan: Plan) -> Plan:
    """Return the plan without these sums and collectives, for a schedule to add."""
    rows = [[each for each in row if each is None or each.op not in WHOLE_STAGE] for row in plan.actions]
    return drop_reduce_ties(plan.with_actions(rows))
