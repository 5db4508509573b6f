"""The ranks of a plan that are in this process, and their ways to all others: one rank, or every one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ...errors import InputError
from ...stage.peer_attributes import is_initialized
from ...stage.replica import refuse_ranks_of_pipeline
from ...stage.stage import PipelineStage
from ..plan import Plan
from .agreement import Agreement, DisagreementError
from .distributed import DistributedTransport
from .failure import BEGIN, Alarm, describe
from .header import share
from .in_process import InProcessTransport, PostOffice
from .meeting import Meeting
from .membership import check_stages
from .transport import Transport


class Connection:
    """Made with the stages of this process, which have to be those that the plan puts here."""

    def __init__(self, stages: Sequence[PipelineStage], plan: Plan, timeout: timedelta) -> None:
        distributed = _is_distributed(stages, plan)
        self.in_process = len(stages) == plan.stages and not distributed
        check_stages(stages, plan, in_process=self.in_process, distributed=distributed)
        self.office = PostOffice()  # for ranks of one process
        self.transports: list[Transport] = []
        self.alarm: Alarm | None = None
        self._number = 0  # the ranks count their schedules alike
        group, device = stages[0].group, stages[0].device
        groups = {group.group_name: group for stage in stages for group in stage.replica.groups}.values()
        copies = [group for group in groups if group.size() > 1]  # nobody is there to agree with otherwise
        pipeline = None
        if self.in_process:
            self.transports += [InProcessTransport(self.office, rank, plan.ranks) for rank in range(plan.ranks)]
        else:
            self.transports.append(_in_group(DistributedTransport(group, device), plan))
            self.alarm = Alarm(group, device, copies)
            pipeline = Agreement(group, timeout)
            self._number = pipeline.number
            for stage in stages:
                refuse_ranks_of_pipeline(stage.replica, stage.stage_index, stage.group)
        self.meeting = Meeting(pipeline, [Agreement(group, timeout) for group in copies])
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
        """Numbers of one rank on all; `numbers` is None elsewhere, `count` how many there may be."""
        return share(self.transports, self._number, kind, source, numbers, count)

    def failed(self, error: Exception, where: str = BEGIN) -> Exception:
        """The error to raise for one before the first action or after the last: others may be waiting already."""
        if self.alarm is None or isinstance(error, DisagreementError):
            return error  # all ranks find out about a disagreement by themselves
        return self.alarm.raise_on_all(describe(self.ranks[0], None, None, error, where), error)


def _is_distributed(stages: Sequence[PipelineStage], plan: Plan) -> bool:
    return is_initialized() and plan.ranks > 1 and dist.get_world_size(stages[0].group) > 1


def _in_group(transport: DistributedTransport, plan: Plan) -> DistributedTransport:
    if transport.ranks != plan.ranks:
        raise InputError(f"the plan is for {plan.ranks} ranks, and the process group has {transport.ranks}")
    return transport
