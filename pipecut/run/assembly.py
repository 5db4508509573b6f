"""The runner of a plan, put together from stages: executors, their parcels and their ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipe_ir import PipeInfo
from ..schedule import COMPUTE, TRANSFERS, Action, Dataflow, Op, Plan, add_reduce_ties
from ..stage import Item, PipelineStage
from .connection import Connection
from .executor import CustomFunction, Executor, Observer, install
from .gradients import AddedLosses
from .loss import Objective
from .parcels import LearntParcels, Parcels, TracedParcels
from .random_numbers import KINDS
from .runner import LocalRunner, RankRunner, Runner
from .ties import DistributedTies, LocalTies, Tie, TiedGradients
from .transport import Transport

MAX_HELD = 3  # stages whose parameters a rank holds gathered: the one that it runs, and those to come
_Stages = Mapping[int, PipelineStage]


@dataclass(frozen=True)
class Assembly:
    """The parts that runners are made from; all stages are of one pipe, `info`, or were cut by hand."""

    info: PipeInfo | None
    ties: Sequence[Tie]
    stages: Sequence[PipelineStage]
    connection: Connection
    objective: Objective
    scale_grads: bool
    custom: Mapping[Op, CustomFunction]
    random_numbers: str
    added_losses: AddedLosses
    observer: Observer | None = None

    def runner(self, plan: Plan) -> Runner:
        """Lower a plan, unless it has transfers already, and make what runs it."""
        lowered = add_reduce_ties(plan if plan.has_transfers else self._lowered(plan)).validate()
        executors = self._executors(lowered)
        for executor in executors:
            install(executor, self.custom)
        if self.connection.in_process:
            return LocalRunner(executors, lowered, self.connection.clock)
        return RankRunner(executors[0], lowered, self.connection.failure_reports)

    def _lowered(self, plan: Plan) -> Plan:
        """Lower a plan, with sharding where a stage of this rank has copies; messages stay the same."""
        has_copies = any(stage.replica.is_reduced for stage in self.stages)
        return plan.lower(max_held=MAX_HELD if has_copies else None)

    def _executors(self, plan: Plan) -> list[Executor]:
        """Make an executor for each rank that is here."""
        every = {stage.stage_index: stage for stage in self.stages}
        local = LocalTies(self.ties, every) if self.connection.in_process else None
        made = []
        for transport in self.connection.transports:
            stages = {index: every[index] for index in plan.placement.stages_of[transport.rank]}
            own = local if local is not None else DistributedTies(self.ties, stages, plan.placement, transport)
            made.append(self._executor(plan, stages, transport, own))
        return made

    def _executor(self, plan: Plan, stages: _Stages, transport: Transport, ties: TiedGradients) -> Executor:
        parcels = _parcels_of(self.info, stages)
        random_numbers = KINDS[self.random_numbers](stages)
        return Executor(
            plan,
            stages,
            parcels,
            transport,
            self.objective,
            scale_gradients=self.scale_grads,
            ties=ties,
            random_numbers=random_numbers,
            added_losses=self.added_losses,
            observer=self.observer,
        )


def _parcels_of(info: PipeInfo | None, stages: _Stages) -> Parcels:
    """Return what is known of the parcels between these stages and others."""
    if info is None:
        return LearntParcels()
    items: dict[tuple[int, int], Sequence[Item]] = {}
    for index, stage in stages.items():
        assert stage.ports is not None  # a traced stage
        items |= {(source, index): parcel for source, parcel in stage.ports.incoming.items()}
        items |= {(index, target): parcel for target, parcel in stage.ports.outgoing.items()}
    return TracedParcels(info, items)


def forward_part(plan: Plan) -> Plan:
    """Return the forwards of a plan, in its order."""

    def forwards(action: Action | None) -> list[Action]:
        leaves = () if action is None else action.leaves
        return [leaf for leaf in leaves if leaf.op is Op.FORWARD]

    rows = [[leaf for action in row for leaf in forwards(action)] for row in plan.actions]
    return replace(plan, name=f"{plan.name}, forward", actions=tuple(map(tuple, rows)), training=False)


def first_part(plan: Plan, microbatches: int) -> Plan:
    """Return a plan with its first microbatches only: no action needs one of another microbatch.

    >>> from pipecut.schedule import plan_for
    >>> print(first_part(plan_for("1F1B", ranks=2, microbatches=8), 1).grid())
    rank 0 │ 0F0 ·   ·   0B0
    rank 1 │ ·   1F0 1B0 ·
    """

    def first(action: Action) -> list[Action]:
        numbered = COMPUTE | TRANSFERS  # the number of any other action is not a microbatch
        left = [leaf for leaf in action.leaves if leaf.op not in numbered or (leaf.microbatch or 0) < microbatches]
        return [action] if len(left) == len(action.leaves) else left

    rows = [[leaf for action in row if action is not None for leaf in first(action)] for row in plan.actions]
    return replace(plan, microbatches=microbatches, actions=tuple(map(tuple, rows)))


def dataflow_of(info: PipeInfo) -> Dataflow:
    """Return the edges of a pipe; an input of the model that needs a gradient goes and comes back like a value."""
    gradients = {(edge.source, edge.target) for edge in info.edges if edge.spec.requires_grad}
    activations = {(edge.source, edge.target) for edge in info.edges if edge.kind == "activation"}
    return Dataflow(
        stages=info.num_stages,
        activations=frozenset(activations | gradients),
        gradients=frozenset(gradients),
        root_inputs=frozenset(edge.target for edge in info.edges if edge.kind == "root input"),
        ties=tuple(frozenset(tie.stages) for tie in info.tied_parameters),
    )
