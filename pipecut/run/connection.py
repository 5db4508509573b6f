"""The ranks of a plan that are in this process, one or all of them, and their ways to the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DisagreementError, InputError, PipeError, PipeWarning
from ..schedule import Op, Plan
from ..stage import PipelineStage, check_not_within_pipeline, is_initialized
from ..torch_internals import is_compiled
from .failure import BEGIN, FailureReports, describe
from .handshake import Exchange, Handshake
from .transport import DistributedTransport, InProcessTransport, ParcelQueues, Transport, TransportFactory

EVAL, STEP, MEAN_LOSS = range(3)


class Connection:
    """The ranks of a plan that are in this process, with their ways to all others.

    The stages have to be those that the plan puts here.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], plan: Plan, timeout: timedelta, transport: TransportFactory | None = None
    ) -> None:
        distributed = _is_distributed(stages, plan)
        self.in_process = len(stages) == plan.stages and not distributed
        _check_stages(stages, plan, in_process=self.in_process, distributed=distributed)
        self.failure_reports: FailureReports | None = None
        self._number = 0  # the ranks count their schedules alike
        group, device = stages[0].group, stages[0].device
        groups = {group.group_name: group for stage in stages for group in stage.replica.groups}.values()
        copies = [group for group in groups if group.size() > 1]  # otherwise there is nobody to agree with
        pipeline = None
        if not self.in_process:
            self.failure_reports = FailureReports(group, device, copies)
            if dist.get_world_size(group) != plan.ranks:
                raise InputError(
                    f"the plan is for {plan.ranks} ranks, and the process group has {dist.get_world_size(group)}"
                )
            pipeline = Exchange(group, timeout, Handshake.late)
            self._number = pipeline.number
            for stage in stages:
                check_not_within_pipeline(stage.replica, stage.stage_index, stage.group)
        here = range(plan.ranks) if self.in_process else [dist.get_rank(group)]
        if transport is not None and not callable(transport):
            raise InputError(f"transport= is a {type(transport).__name__}: {_TRANSPORT_REMEDY}")
        make = transport if transport is not None else _default_transport(group, device, in_process=self.in_process)
        self.transports = [_checked_transport(make(rank, plan.ranks), rank, plan.ranks) for rank in here]
        self.handshake = Handshake(pipeline, [Exchange(group, timeout, Handshake.late) for group in copies])
        self._check_placement(stages, plan)

    def _check_placement(self, stages: Sequence[PipelineStage], plan: Plan) -> None:
        given = {stage.stage_index for stage in stages}
        wanted = {stage for rank in self.ranks for stage in plan.placement.stages_of[rank]}
        if given != wanted:
            where = "a process without torch.distributed" if self.in_process else f"rank {self.ranks[0]}"
            raise InputError(f"in this plan {where} has stages {sorted(wanted)}, and was given {sorted(given)}")

    @property
    def ranks(self) -> list[int]:
        """The ranks that are here."""
        return [transport.rank for transport in self.transports]

    def share(self, kind: int, source: int, numbers: list[int] | None, count: int) -> list[int]:
        """Return the numbers of one rank on all; `numbers` is None elsewhere, `count` how many there may be."""
        return _share(self.transports, self._number, kind, source, numbers, count)

    def failed(self, error: Exception, where: str = BEGIN) -> Exception:
        """Return the error to raise for one before the first action or after the last: others may be waiting."""
        if self.failure_reports is None or isinstance(error, DisagreementError):
            return error  # all ranks find out about a disagreement by themselves
        return self.failure_reports.raise_on_all(describe(self.ranks[0], None, None, error, where), error)


def _is_distributed(stages: Sequence[PipelineStage], plan: Plan) -> bool:
    return is_initialized() and plan.ranks > 1 and dist.get_world_size(stages[0].group) > 1


def _default_transport(group: dist.ProcessGroup | None, device: torch.device, *, in_process: bool) -> TransportFactory:
    if in_process:
        queues = ParcelQueues()
        return lambda rank, ranks: InProcessTransport(queues, rank, ranks)
    return lambda rank, ranks: DistributedTransport(group, device)


_TRANSPORT_REMEDY = "pass a function of (rank, ranks) that returns an object with the protocol of pipecut.run.Transport"
_PROTOCOL = ("rank", "ranks", "receives_ahead", "send", "receive", "share", "finish", "clear")


def _checked_transport(transport: Transport, rank: int, ranks: int) -> Transport:
    missing = [name for name in _PROTOCOL if not hasattr(transport, name)]
    if missing:
        raise InputError(
            f"{type(transport).__name__}, made by transport=, has no {', '.join(missing)}: {_TRANSPORT_REMEDY}"
        )
    if (transport.rank, transport.ranks) != (rank, ranks):
        raise InputError(
            f"{type(transport).__name__} is made for rank {transport.rank} of {transport.ranks}, and the schedule "
            f"needs one for rank {rank} of {ranks}: let transport= be a function of (rank, ranks) that makes it"
        )
    return transport


# Numbers that one rank shares with all.

_CALLS = {EVAL: "eval()", STEP: "step()", MEAN_LOSS: "mean_loss()"}
_SIZE = 256  # numbers that a call shares, or a multiple of it


def _share(
    transports: Sequence[Transport], schedule: int, kind: int, source: int, numbers: list[int] | None, count: int
) -> list[int]:
    """Share numbers in a message that has one size for all calls, so that calls that differ are noticed."""
    size = _SIZE * ((3 + count + _SIZE - 1) // _SIZE)
    if numbers is not None:
        numbers = [kind, schedule, len(numbers), *numbers] + [0] * (size - 3 - len(numbers))
    shared = [transport.share(source, numbers, size) for transport in transports][-1]
    if shared[:2] != [kind, schedule]:
        raise PipeError(
            f"rank {source} called {_CALLS.get(shared[0], 'something else')} of schedule {shared[1]}, and this rank "
            f"{_CALLS[kind]} of schedule {schedule}: make the same calls in the same order on every rank"
        )
    return shared[3 : 3 + shared[2]]


# Checks of stages.


def as_list(stages: Any) -> list[PipelineStage]:
    """Return one stage, or several, as a list."""
    return list(stages) if isinstance(stages, Iterable) else [stages]


def checked(stages: Sequence[PipelineStage]) -> Sequence[PipelineStage]:
    """Return the stages of a schedule, checked to be a list of stages of one pipeline."""
    if not isinstance(stages, Sequence):
        raise InputError(f"stages is a list of the stages of this rank, got {type(stages).__name__}: give [stage]")
    if not stages:
        raise InputError("a schedule needs the stages of this rank; got none")
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise InputError(f"a schedule takes PipelineStages, got {type(stage).__name__}: see pipe.build_stage()")
    totals = {stage.num_stages for stage in stages}
    if len(totals) > 1:
        raise InputError(f"the stages are of pipelines with different numbers of stages: {sorted(totals)}")
    return stages


def _check_stages(stages: Sequence[PipelineStage], plan: Plan, *, in_process: bool, distributed: bool) -> None:
    """Raise on stages that are not those of the plan."""
    traced = stages[0].pipe_info is not None
    for stage in stages:
        if stage.num_stages != plan.stages:
            raise InputError(
                f"stage {stage.stage_index} is one of {stage.num_stages} stages, and the plan '{plan.name}' "
                f"has {plan.stages}"
            )
        if (stage.pipe_info is not None) != traced:
            raise InputError("some stages are traced and others cut by hand: make all of them in one way")
    if _splits_backward(plan):
        _warn_of_compiled(plan, stages)
    indices = sorted(stage.stage_index for stage in stages)
    twice = [index for index in indices if indices.count(index) > 1]
    if twice:
        raise InputError(f"stage {twice[0]} was passed twice")
    if not in_process and not distributed:
        missing = sorted(set(range(plan.stages)) - set(indices))
        raise InputError(
            f"stages {missing} are missing, and there is no rank that could hold them: without torch.distributed, or "
            "on one rank, a schedule takes all stages. On many ranks, call torch.distributed.init_process_group() "
            "before, with world_size= their number"
        )


def _splits_backward(plan: Plan) -> bool:
    leaves = (leaf for row in plan.actions for action in row if action is not None for leaf in action.leaves)
    return any(leaf.op is Op.BACKWARD_INPUT for leaf in leaves)


def _warn_of_compiled(plan: Plan, stages: Sequence[PipelineStage]) -> None:
    """Warn that the schedule cannot do what it is for; the gradients are right."""
    compiled = [stage.stage_index for stage in stages if any(map(is_compiled, stage.submod.modules()))]
    if compiled:
        which = f"stage {compiled[0]} has" if len(compiled) == 1 else f"stages {compiled} have"
        warnings.warn(
            f"{which} modules compiled by torch.compile. The backward of each is one piece: its weight gradients are "
            f"computed along with those of its inputs, and are not left for the idle time that {plan.name} fills with "
            "them. A schedule with full backwards, such as 1F1B or Interleaved1F1B, does the same with less memory",
            PipeWarning,
            stacklevel=2,
        )
