"""What all schedules have in common: a plan, stages, and a step that runs the one on the other."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InputError, PipeError
from ...pipe_ir.pipe import PipeInfo
from ...stage.merge import merge_chunks
from ...stage.ports import Item
from ...stage.replica import refuse_ranks_of_pipeline
from ...stage.stage import PipelineStage
from ..action import Action, Op
from ..lower import add_reduce_ties
from ..plan import Plan
from ..rules import Dataflow
from ..timeline import Timeline
from .agreement import Agreement, DisagreementError, facts_of
from .batch import Batch
from .calls import Calls, cut_by_hand, cut_target, cut_traced
from .custom import CustomFunction, checked_op, install
from .dataflow import dataflow_of
from .distributed import DistributedTransport
from .executor import Executor
from .failure import BEGIN, END, Alarm, describe
from .header import EVAL, MEAN_LOSS, STEP, share
from .in_process import InProcessTransport, PostOffice
from .membership import check_stages
from .parcels import LearntParcels, Parcels, TracedParcels
from .runner import LocalRunner, RankRunner, Runner
from .ties import DistributedTies, LocalTies, TiedGradients, fingerprint, held_parameter
from .transport import Transport

MAX_HELD = 3  # stages whose parameters a rank holds gathered: the one that it runs, and those to come


class PipelineSchedule:
    """Trains and evaluates stages by a plan.

    Every rank makes one with its own stages, and calls `step`. Inputs are needed on the rank of the first stage, the
    target on that of the last. In a process without torch.distributed it takes all stages, and runs all ranks.
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
    ) -> None:
        self.stages = list(stages)
        self.loss_fn = loss_fn
        self.scale_grads = scale_grads
        self.check_loss = check_loss
        self._specs = (args_chunk_spec, kwargs_chunk_spec)
        self._merge_spec = output_merge_spec
        self.info: PipeInfo | None = self.stages[0].pipe_info
        self.plan = plan.with_dataflow(self._dataflow(plan)).validate()
        self.n_microbatches = plan.microbatches
        self.in_process = len(self.stages) == self.plan.stages and not self._is_distributed()
        self._runners: dict[bool, Runner] = {}
        self._custom: dict[Op, CustomFunction] = {}
        self._transports: list[Transport] = []
        self._alarm: Alarm | None = None
        self._agreement: Agreement | None = None
        self._number = 0
        self._timeout = timedelta(seconds=timeout)
        self._connect()
        self._losses: dict[int, Tensor] = {}
        self._samples: list[int] = []

    def _is_distributed(self) -> bool:
        if not dist.is_available() or not dist.is_initialized() or self.plan.ranks == 1:
            return False
        return dist.get_world_size(self.stages[0].group) > 1 or len(self.stages) < self.plan.stages

    def _dataflow(self, plan: Plan) -> Dataflow:
        return plan.dataflow if self.info is None else dataflow_of(self.info)

    def _connect(self) -> None:
        """Make the transports, and check that the stages are those that the plan puts here."""
        check_stages(self.stages, self.plan, in_process=self.in_process, distributed=self._is_distributed())
        device = self.stages[0].device
        groups = {group.group_name: group for stage in self.stages for group in stage.replica.groups}
        if self.in_process:
            office = PostOffice()
            self._office = office
            self._transports = [InProcessTransport(office, rank, self.plan.ranks) for rank in range(self.plan.ranks)]
        else:
            distributed = DistributedTransport(self.stages[0].group, device)
            if distributed.ranks != self.plan.ranks:
                raise InputError(
                    f"the plan is for {self.plan.ranks} ranks, and the process group has {distributed.ranks}"
                )
            self._transports = [distributed]
            self._alarm = Alarm(self.stages[0].group, device, groups.values())
            self._agreement = Agreement(self.stages[0].group, self._timeout)
            self._number = self._agreement.number
            for stage in self.stages:
                refuse_ranks_of_pipeline(stage.replica, stage.stage_index, stage.group)
        self._agreements_of_copies = [Agreement(group, self._timeout) for group in groups.values()]
        given = {stage.stage_index for stage in self.stages}
        wanted = {stage for transport in self._transports for stage in self.plan.placement.stages_of[transport.rank]}
        if given != wanted:
            rank = "a process without torch.distributed" if self.in_process else f"rank {self._transports[0].rank}"
            raise InputError(f"in this plan {rank} has stages {sorted(wanted)}, and was given {sorted(given)}")

    # ------------------------------------------------------------------ the user's side

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One training step: forward and backward of all microbatches; gradients are added to the parameters' `.grad`.

        Returns the output for the whole batch on the rank of the last stage, None elsewhere. Keywords go to the model;
        modules that were cut by hand each get those that were passed on their rank. With a forward-only plan it is the
        same as `eval`.
        """
        return self._run(self.plan.training, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward only, without gradients. The mode of the modules is up to you: call `stage.submod.eval()` before."""
        return self._run(False, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def register_custom_function(self, op: Op | str, function: CustomFunction) -> None:
        """Let `function(action, context)` do all actions of a kind; `context.run(action)` does one in the usual way.

        Register on every rank before the first step, for instance for OVERLAP_F_B.
        """
        kind = checked_op(op)
        if self._runners:
            raise InputError("register custom functions before the first step")
        self._custom[kind] = function

    def trace(self) -> Timeline:
        """What the last step did on the ranks of this process, if `tracing` was on."""
        spans = [span for runner in self._runners.values() for span in runner.spans]
        return Timeline(f"{self.plan.name}, executed", self.plan.ranks, tuple(spans), "s")

    @property
    def tracing(self) -> bool:
        """Whether the times of actions are taken down."""
        return any(runner.tracing for runner in self._runners.values())

    @tracing.setter
    def tracing(self, on: bool) -> None:
        for training in (True, False):
            self._runner(training).tracing = on

    def mean_loss(self) -> float:
        """The loss of the whole batch in the last step, on every rank. All ranks have to call it."""
        last = self.plan.placement.rank_of[self.plan.stages - 1]
        numbers = None
        if any(transport.rank == last for transport in self._transports):
            total = sum(self._samples)
            weights = [self._samples[nth] / total if self.scale_grads else 1.0 for nth in self._losses]
            loss = sum(weight * value.item() for weight, value in zip(weights, self._losses.values(), strict=True))
            numbers = [len(self._losses), struct.unpack("q", struct.pack("d", loss))[0]]
        try:
            count, bits = self._shared(MEAN_LOSS, last, numbers, 2)
        except Exception as error:
            raise self._failed(error, END) from error
        if not count:
            raise InputError("there is no loss yet: call step(), or eval() with a target, before mean_loss()")
        return float(struct.unpack("d", struct.pack("q", bits))[0])

    # ------------------------------------------------------------------ one step

    def _run(
        self,
        training: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        losses: list[Tensor] | None,
        return_outputs: bool,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Any:
        try:
            self._agree()
            runner = self._runner(training)
            calls = self._calls(args, kwargs)
            header = self._share(training, calls)
            batches = {
                transport.rank: self._batch(
                    transport.rank, training, header, calls, kwargs, target, loss_kwargs, return_outputs
                )
                for transport in self._transports
            }
        except Exception as error:
            raise self._failed(error) from error
        runner.run(batches)
        last = batches.get(self.plan.placement.rank_of[self.plan.stages - 1])
        if last is None:
            self._losses, self._samples = {}, header[0]
            return None
        self._losses, self._samples = last.losses, last.samples
        in_order = [last.losses[number] for number in sorted(last.losses)]
        if losses is not None:
            losses[:] = in_order
        if training and self.check_loss:
            self._refuse_nan(in_order)
        if not return_outputs:
            return None
        try:
            results = [last.results[number] for number in sorted(last.results)]
            return merge_chunks(results, self._merge_spec, sizes=last.samples)
        except Exception as error:
            raise self._failed(error, END) from error

    def _agree(self) -> None:
        """Before the first step: all ranks are about to do the same."""
        if self._agreement is None and not self._agreements_of_copies:
            return
        options = {"scale_grads": self.scale_grads, "version of torch": torch.__version__}
        facts = facts_of(self.plan, self.info, options)
        if self._agreement is not None:
            self._agreement.reach(facts, self._values_of_ties())
            self._agreement = None
        stages = {"stages of a rank and its copies": str([stage.stage_index for stage in self.stages])}
        while self._agreements_of_copies:
            self._agreements_of_copies.pop(0).reach(facts | stages)

    def _values_of_ties(self) -> dict[str, str]:
        """So that holders of one parameter begin with the same values."""
        held = {stage.stage_index: stage for stage in self.stages}
        ties = () if self.info is None else self.info.tied_parameters
        remedy = "seed the model, or load a checkpoint, alike on all ranks"
        return {
            f"values of the tied parameter {tie.names[0]} ({remedy})": fingerprint(held_parameter(tie, held))
            for tie in ties
            if any(stage in held for stage in tie.stages)
        }

    def _failed(self, error: Exception, where: str = BEGIN) -> Exception:
        """Before the first action or after the last: the others may be waiting already."""
        if self._alarm is None or isinstance(error, DisagreementError):
            return error  # all ranks find out about a disagreement by themselves
        return self._alarm.raise_on_all(describe(self._transports[0].rank, None, None, error, where))

    def _refuse_nan(self, losses: Sequence[Tensor]) -> None:
        if losses and bool(torch.stack([loss.float() for loss in losses]).isnan().any()):
            numbers = [number for number, loss in enumerate(losses) if bool(loss.isnan())]
            error = PipeError(
                f"the loss is NaN for microbatches {numbers}: the gradients of this step are of no use. Pass "
                "check_loss=False to the schedule if something else, such as a gradient scaler, looks after that"
            )
            raise self._failed(error, END) from error

    def _calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Calls | None:
        """The microbatches, on the rank of the first stage."""
        first = self.plan.placement.rank_of[0]
        if all(transport.rank != first for transport in self._transports):
            return None
        if not args and not kwargs:
            raise InputError(
                "step() got no input on the rank of the first stage: pass the arguments of the whole batch"
            )
        if self.info is not None:
            return cut_traced(self.info.call, args, kwargs, self.n_microbatches, self._specs)
        return cut_by_hand(args, kwargs, self.n_microbatches, self._specs)

    def _share(self, training: bool, calls: Calls | None) -> tuple[list[int], list[tuple[int, ...]]]:
        """Tell all ranks what kind of step it is, and the sizes of its microbatches."""
        width = 1 if self.info is None else len(self.info.call.dims)
        numbers = None
        if calls is not None:
            numbers = []
            for samples, sizes in zip(calls.samples, calls.sizes, strict=True):
                numbers += [samples, *sizes]
        kind = STEP if training else EVAL
        shared = self._shared(kind, self.plan.placement.rank_of[0], numbers, self.n_microbatches * (1 + width))
        rows = [shared[nth * (1 + width) :][: 1 + width] for nth in range(self.n_microbatches)]
        return [row[0] for row in rows], [tuple(row[1:]) for row in rows]

    def _shared(self, kind: int, source: int, numbers: list[int] | None, count: int) -> list[int]:
        return share(self._transports, self._number, kind, source, numbers, count)

    def _batch(
        self,
        rank: int,
        training: bool,
        header: tuple[list[int], list[tuple[int, ...]]],
        calls: Calls | None,
        kwargs: Mapping[str, Any],
        target: Any,
        loss_kwargs: Mapping[str, Any] | None,
        return_outputs: bool,
    ) -> Batch:
        samples, sizes = header
        batch = Batch(training, samples, sizes, loss_kwargs=loss_kwargs or {}, keep_results=return_outputs)
        if calls is not None and rank == self.plan.placement.rank_of[0]:
            batch.args, batch.kwargs, batch.roots = calls.args, calls.kwargs, calls.roots
        elif self.info is None and kwargs:
            own = cut_by_hand((), kwargs, self.n_microbatches, (None, self._specs[1]))
            if own.cut and own.samples != samples:
                raise InputError(
                    f"the keyword arguments of rank {rank} have {sum(own.samples)} samples, and the batch has "
                    f"{sum(samples)}: pass those of the whole batch"
                )
            batch.kwargs = own.kwargs
        if rank == self.plan.placement.rank_of[self.plan.stages - 1]:
            self._give_target(batch, target)
        return batch

    def _give_target(self, batch: Batch, target: Any) -> None:
        if target is not None:
            batch.targets = cut_target(target, batch.samples)
        if not batch.training:
            return
        if self.loss_fn is None:
            raise InputError(
                "a training step needs a loss: make the schedule with loss_fn=, a function of (output, target)"
            )
        if target is None:
            raise InputError(
                "step() got no target on the rank of the last stage: pass target=, that of the whole batch"
            )

    # ------------------------------------------------------------------ how it runs

    def _runner(self, training: bool) -> Runner:
        if training not in self._runners:
            self._runners[training] = self._make_runner(training)
        return self._runners[training]

    def _make_runner(self, training: bool) -> Runner:
        plan = self.plan if training else forward_part(self.plan)
        lowered = add_reduce_ties(plan if plan.has_transfers else self._lowered(plan)).validate()
        executors = [self._executor(lowered, transport) for transport in self._transports]
        for executor in executors:
            install(executor, self._custom)
        if self.in_process:
            return LocalRunner(executors, lowered, self._office)
        return RankRunner(executors[0], lowered, self._alarm)

    def _lowered(self, plan: Plan) -> Plan:
        """With sharding where a stage of this rank has copies; that does not change the messages between ranks."""
        has_copies = any(stage.replica.is_reduced for stage in self.stages)
        return plan.lower(max_held=MAX_HELD if has_copies else None)

    def _executor(self, plan: Plan, transport: Transport) -> Executor:
        stages = {
            stage.stage_index: stage
            for stage in self.stages
            if self.plan.placement.rank_of[stage.stage_index] == transport.rank
        }
        return Executor(
            plan,
            stages,
            self._parcels(stages),
            transport,
            self.loss_fn,
            scale_gradients=self.scale_grads,
            ties=self._ties(stages, transport),
        )

    def _parcels(self, stages: Mapping[int, PipelineStage]) -> Parcels:
        if self.info is None:
            return LearntParcels()
        items: dict[tuple[int, int], Sequence[Item]] = {}
        for index, stage in stages.items():
            assert stage.ports is not None  # a traced stage
            items |= {(source, index): parcel for source, parcel in stage.ports.incoming.items()}
            items |= {(index, target): parcel for target, parcel in stage.ports.outgoing.items()}
        return TracedParcels(self.info, items)

    def _ties(self, stages: Mapping[int, PipelineStage], transport: Transport) -> TiedGradients:
        ties = () if self.info is None else self.info.tied_parameters
        if not self.in_process:
            return DistributedTies(ties, stages, self.plan.placement, transport)
        if not hasattr(self, "_local_ties"):
            self._local_ties = LocalTies(ties, {stage.stage_index: stage for stage in self.stages})
        return self._local_ties


def forward_part(plan: Plan) -> Plan:
    """The forwards of a plan, in its order."""

    def forwards(action: Action | None) -> list[Action]:
        leaves = () if action is None else action.leaves
        return [leaf for leaf in leaves if leaf.op is Op.FORWARD]

    rows = [[leaf for action in row for leaf in forwards(action)] for row in plan.actions]
    return replace(plan, name=f"{plan.name}, forward", actions=tuple(map(tuple, rows)), training=False)
