"""Base class of all schedules: runs a plan on a set of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, LossesError
from ..pipe_ir import PipeInfo
from ..schedule import Action, Dataflow, Op, Plan, Timeline, add_reduce_ties
from ..stage import Item, PipelineStage, StepSeeds
from .connection import MEAN_LOSS, Connection, checked
from .executor import CustomFunction, Executor, Observer, checked_op, install
from .failure import END
from .inputs import Given, InputCutter
from .last_stage import merged
from .loss import NUMBERS, Losses, LossWeight, Objective, mean_from, weighing_of
from .parcels import LearntParcels, Parcels, TracedParcels
from .random_numbers import KINDS, checked_kind, with_states
from .runner import LocalRunner, LossProbing, RankRunner, Runner
from .ties import DistributedTies, LocalTies, Tie, TiedGradients, declared_ties, ties_of_pipe, with_ties
from .transport import Transport, TransportFactory


class PipelineSchedule:
    """Trains and evaluates stages by a plan.

    Every rank makes one with its own stages, and calls `step`. Inputs are needed on the rank of the first stage, the
    target on that of the last. In a process without torch.distributed it takes all stages, and runs all ranks.

    Options:

    - `loss_fn(output, target)`, or `loss_fn(output)` if it takes one argument, makes the loss. Without it the model
      makes its own: its output has a `loss`, as an attribute or a key, or is a tuple that begins with a number, or is a
      number. Labels are then among the model's arguments, and there is no target. If the output holds no loss either,
      `step` runs forwards only and warns; once a step has trained, that is an error.
    - `scale_grads`: a microbatch counts as much as it has samples, so the loss should be a mean over samples. For a sum
      pass False.
    - `loss_weight` returns how much a microbatch counts, for a mean over something else, such as the labels that are
      not ignored. It is a function of the target or, without a loss_fn that takes one, of the arguments by name (those
      of a traced model; of modules that were cut by hand, the keywords on the last stage's rank).
    - `args_chunk_spec`, `kwargs_chunk_spec` and `target_chunk_spec` say in which dim the samples are, if not the first;
      `output_merge_spec` says how outputs are merged.
    - `check_loss`: raise an error for a loss that is NaN.
    - `timeout`: seconds to wait for other ranks before the first step.
    - `ties`: parameters that modules cut by hand share, each a dict from stage to the name of the parameter there.
    - `transport` is a function of a rank and the number of ranks that makes the way between ranks, if it should not be
      torch.distributed: see `pipecut.run.Transport`.
    - `random_numbers` says what dropout and the like draw from: see below.

    Values that are not means over samples, such as how evenly a router of experts spreads a batch, are those of each
    microbatch, as where gradients are accumulated without a pipeline.

    >>> import torch
    >>> from torch import nn
    >>> from pipecut import Schedule1F1B, pipeline
    >>> class Tagger(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 5)
    ...     def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    ...         logits = self.head(self.embed(ids))
    ...         return {"loss": nn.functional.cross_entropy(logits.mT, labels), "logits": logits}
    >>> batch = {"ids": torch.ones(4, 3, dtype=torch.long), "labels": torch.tensor([[2, -100, 4]] * 3 + [[1, 2, 3]])}
    >>> model = Tagger()
    >>> pipe = pipeline(model, (), batch, num_stages=2)
    >>> def how_many(batch: dict[str, Tensor]) -> Tensor:
    ...     return (batch["labels"] != -100).sum()
    >>> stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    >>> output = Schedule1F1B(stages, n_microbatches=2, loss_weight=how_many).step(**batch)
    >>> torch.allclose(output["loss"], model(**batch)["loss"])
    True

    `random_numbers` says what dropout and the like draw from, in forwards and in the loss:

    - "per_stage": each stage has a stream of its own for each microbatch of each step. They follow from a seed that
      every rank takes from torch's default generator when a step begins, and of which that of the first stage's rank
      is used. So the numbers follow from `torch.manual_seed()`, the stages and the microbatches, and not from the
      schedule, nor from how many ranks there are. They are not those of the uncut model.
    - "as_uncut": each microbatch has one stream for all stages: the numbers are those of the uncut model that runs one
      microbatch after the other under `pipecut.random_streams()`. The position of a stream goes along from stage to
      stage, some 5 kB for each microbatch; an accelerator waits for it.
    - "per_process": the default generators of each process, in the order in which things run there.

    Whatever it says, backwards draw from the default generators; a checkpoint that runs again draws what it drew.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        plan: Plan,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        check_loss: bool = True,
        timeout: float = 120.0,
        random_numbers: str = "per_stage",
        loss_weight: LossWeight | None = None,
        target_chunk_spec: Any = None,
        ties: Sequence[Mapping[int, str]] = (),
        transport: TransportFactory | None = None,
    ) -> None:
        self.stages = list(self._checked_stages(stages))
        self.n_microbatches = plan.microbatches
        self.scale_grads = scale_grads
        self.check_loss = check_loss
        self.random_numbers = checked_kind(random_numbers)
        self._given_ties = ties
        self._transport = transport
        self._timeout = timedelta(seconds=timeout)
        self._merge_spec = output_merge_spec
        self._specs = (args_chunk_spec, kwargs_chunk_spec, target_chunk_spec)
        self._objective = Objective(loss_fn)
        self._probing = LossProbing(self._objective)
        self._loss_weight = loss_weight
        self._seeds = None if random_numbers == "per_process" else StepSeeds()
        self._runners: dict[tuple[bool, bool], Runner] = {}  # by training and scale_grads, which may be set
        self._last_runner: Runner | None = None
        self._custom: dict[Op, CustomFunction] = {}
        self._observer: Observer | None = None
        self._losses = Losses()
        self.tracing = False  # True: note the times of actions, for trace()
        self._use(plan)

    @staticmethod
    def _checked_stages(stages: Sequence[PipelineStage]) -> Sequence[PipelineStage]:
        return checked(stages)

    def _use(self, plan: Plan) -> None:
        """Get ready to run a plan: the first one, or another than before."""
        self.info: PipeInfo | None = self.stages[0].pipe_info
        for stage in self.stages:
            stage.find_wrappers()
        declared = declared_ties(self._given_ties, self.stages)
        self.ties = declared if self.info is None else ties_of_pipe(self.info)
        dataflow = with_ties(plan.dataflow, declared) if self.info is None else _dataflow_of(self.info)
        self.plan = plan.with_dataflow(with_states(dataflow, self.random_numbers)).validate()
        self._connection = Connection(self.stages, self.plan, self._timeout, self._transport)
        self.in_process = self._connection.in_process
        self._weighing = weighing_of(self._loss_weight, self._objective, self.info, self.scale_grads)
        self._cutter = InputCutter(
            self.plan,
            self.info,
            self.stages,
            self._specs,
            self._connection,
            self._objective,
            self._weighing,
            self._seeds,
        )
        self._last_rank = self.plan.placement.rank_of[self.plan.stages - 1]
        self._runners = {}
        self._last_runner = None

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a training step: forward and backward of all microbatches, which add to the parameters' `.grad`.

        Returns the output for the whole batch on the rank of the last stage, None elsewhere. Keywords go to the model;
        modules that were cut by hand each get those that were passed on their rank and that their forward takes. With a
        forward-only plan it is the same as `eval`.
        """
        return self._run(
            Given(self.plan.training, args, kwargs, target, loss_kwargs, return_outputs, self._merge_spec, losses)
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards only, without gradients; losses are made if there is a target, or labels.

        The mode of the modules is up to you: call `stage.submod.eval()` before.
        """
        return self._run(Given(False, args, kwargs, target, loss_kwargs, return_outputs, self._merge_spec, losses))

    def register_custom_function(self, op: Op | str, function: CustomFunction) -> None:
        """Let `function(action, context)` run all actions of a kind; `context.run(action)` runs one as usual.

        Register on every rank before the first step, for instance for OVERLAP_F_B.
        """
        kind = checked_op(op)
        if self._runners:
            raise InputError("register custom functions before the first step")
        self._custom[kind] = function

    def trace(self) -> Timeline:
        """Return the times of the last `step` or `eval` on the ranks of this process, if `tracing` was on."""
        spans = () if self._last_runner is None else tuple(self._last_runner.spans)
        return Timeline(f"{self.plan.name}, executed", self.plan.ranks, spans, "s")

    def mean_loss(self) -> float:
        """Return the loss of the whole batch in the last step, on every rank. All ranks have to call it."""
        has_losses = self._last_rank in self._connection.ranks
        numbers = self._losses.as_numbers(self.scale_grads) if has_losses else None
        try:
            shared = self._connection.share(MEAN_LOSS, self._last_rank, numbers, NUMBERS)
        except Exception as error:
            raise self._connection.failed(error, END) from error
        return mean_from(shared)

    def _run(self, given: Given) -> Any:
        try:
            if not self._connection.handshake.is_done:
                self._run_handshake()
            self._check_given(given)
            for stage in self.stages:
                stage.check_no_new_wrappers()
            runner = self._runner(given.training)
            states = self._cutter.make(given)
        except Exception as error:
            raise self._connection.failed(error) from error
        runner.tracing = self.tracing
        self._last_runner = runner
        trains, reported = given.training, self._connection.handshake.reported
        if trains and self._weighing is None and self._probing.is_needed(self.plan, reported):
            trains = self._probing.run(runner, states)
        else:
            runner.run(states)
        last = states.get(self._last_rank)
        if last is None:
            self._losses = Losses()
            return None
        self._losses = Losses(last.losses, last.weights or last.samples)
        if given.losses is not None:
            given.losses[:] = self._losses.in_order()
        try:
            if self._weighing is not None and last.losses:
                self._weighing.check_no_losses_without(last.weights)
            if trains and self.check_loss:
                self._losses.check_no_nan(self.scale_grads)
            return merged(last, self._losses, scaled=self.scale_grads) if given.return_outputs else None
        except Exception as error:
            raise self._connection.failed(error, END) from error

    def _run_handshake(self) -> None:
        """Compare with the other ranks what is about to be run."""
        weighs = "no" if self._weighing is None else f"by the {self._weighing.source}"
        options = {"scale_grads": self.scale_grads, "random_numbers": self.random_numbers, "loss_weight": weighs}
        own = self._probing.fact if self._last_rank in self._connection.ranks else {}
        self._connection.handshake.run(self.plan, self.info, self.ties, self.stages, options, own)

    def _check_given(self, given: Given) -> None:
        """Raise on what a step cannot be called with."""
        if given.training and torch.is_inference_mode_enabled():
            raise InputError(
                "step() needs gradients, and torch.inference_mode() is on here: call it outside, or call eval()"
            )
        if given.losses is not None and not isinstance(given.losses, list):
            raise LossesError(f"losses must be a list, which is filled; got {type(given.losses).__name__}")

    def _runner(self, training: bool) -> Runner:
        key = training, self.scale_grads
        if key not in self._runners:
            plan = self.plan if training else _forward_part(self.plan)
            parts = _Assembly(
                self.info,
                self.ties,
                self.stages,
                self._connection,
                self._objective,
                self.scale_grads,
                custom=self._custom,
                random_numbers=self.random_numbers,
                observer=self._observer,
            )
            self._runners[key] = parts.runner(plan)
        return self._runners[key]


# The runner of a plan, put together from stages: executors, their parcels and their ties.

_MAX_HELD = 3  # stages whose parameters a rank holds gathered: the one that it runs, and those to come
_Stages = Mapping[int, PipelineStage]


@dataclass(frozen=True)
class _Assembly:
    """The parts that runners are made from; all stages are of one pipe, `info`, or were cut by hand."""

    info: PipeInfo | None
    ties: Sequence[Tie]
    stages: Sequence[PipelineStage]
    connection: Connection
    objective: Objective
    scale_grads: bool
    custom: Mapping[Op, CustomFunction]
    random_numbers: str
    observer: Observer | None = None

    def runner(self, plan: Plan) -> Runner:
        """Lower a plan, unless it has transfers already, and make what runs it."""
        lowered = add_reduce_ties(plan if plan.has_transfers else self._lowered(plan)).validate()
        executors = self._executors(lowered)
        for executor in executors:
            install(executor, self.custom)
        if self.connection.in_process:
            return LocalRunner(executors, lowered)
        return RankRunner(executors[0], lowered, self.connection.failure_reports)

    def _lowered(self, plan: Plan) -> Plan:
        """Lower a plan, with sharding where a stage of this rank has copies; messages stay the same."""
        has_copies = any(stage.replica.is_reduced for stage in self.stages)
        return plan.lower(max_held=_MAX_HELD if has_copies else None)

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


def _forward_part(plan: Plan) -> Plan:
    """Return the forwards of a plan, in its order."""

    def forwards(action: Action | None) -> list[Action]:
        leaves = () if action is None else action.leaves
        return [leaf for leaf in leaves if leaf.op is Op.FORWARD]

    rows = [[leaf for action in row for leaf in forwards(action)] for row in plan.actions]
    return replace(plan, name=f"{plan.name}, forward", actions=tuple(map(tuple, rows)), training=False)


def _dataflow_of(info: PipeInfo) -> Dataflow:
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
