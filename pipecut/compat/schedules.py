"""torch.distributed.pipelining.schedules over pipecut's schedules and plans."""

from __future__ import annotations

import json
import logging
import re
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import InputError
from ..run import schedules as own
from ..run.connection import refuse_compiled
from ..run.custom import ActionContext
from ..run.inputs import Given
from ..run.schedule import PipelineSchedule
from ..schedule import peer_passes
from ..schedule.action import Op
from ..schedule.peer_action import PeerAction, PeerOrder, PeerRow
from ..stage.stage import PipelineStage
from . import _utils
from . import microbatch as _microbatch
from . import stage as _stage
from .microbatch import TensorChunkSpec
from .replaced import replaced

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]

_Action = PeerAction
_ComputationType = Op
FORWARD = F = Op.FORWARD
BACKWARD_INPUT = I = Op.BACKWARD_INPUT  # noqa: E741 (the peer's name)
BACKWARD_WEIGHT = W = Op.BACKWARD_WEIGHT
FULL_BACKWARD = B = Op.FULL_BACKWARD
OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD = Op.OVERLAP_F_B, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD
SEND_F, RECV_F, SEND_B, RECV_B = Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B
_action_regex = re.compile(rf"(\d+)({'|'.join(op.value for op in Op if op is not Op.OVERLAP_F_B)})(\d*)")
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)

_PipelineSchedule = PipelineSchedule
PipelineScheduleSingle = own.PipelineScheduleSingle
PipelineScheduleMulti = own.PipelineScheduleMulti
_PipelineScheduleRuntime = own.PipelineScheduleRuntime
ScheduleGPipe = own.ScheduleGPipe
Schedule1F1B = own.Schedule1F1B
ScheduleInterleaved1F1B = own.ScheduleInterleaved1F1B
ScheduleLoopedBFS = own.ScheduleLoopedBFS
ScheduleInterleavedZeroBubble = own.ScheduleInterleavedZeroBubble
ScheduleZBVZeroBubble = own.ScheduleZBVZeroBubble
ScheduleDualPipeV = own.ScheduleDualPipeV
get_schedule_class = own.get_schedule_class

# What the peer's module has by its imports.
logger = logging.getLogger(__name__)
_split_tensor = _microbatch._split_tensor
merge_chunks = _microbatch.merge_chunks
split_args_kwargs_into_chunks = _microbatch.split_args_kwargs_into_chunks
_PipelineStageBase = _stage._PipelineStageBase
_RecvInfo = _stage._RecvInfo
InferenceMode = _utils.InferenceMode
generate_rank_to_stage_mapping = _utils.generate_rank_to_stage_mapping
generate_stage_to_rank_mapping = _utils.generate_stage_to_rank_mapping

_ORDERS = "the order of a schedule is its pipeline_order, and pipecut.compat._schedule_visualizer.get_schedule_ops()"
_get_1f1b_rank_ops = replaced("_get_1f1b_rank_ops", _ORDERS)
_get_warmup_ops = replaced("_get_warmup_ops", _ORDERS)

_Order = Mapping[int, Iterable["PeerAction | None"]]
_RankOf = Callable[[int], int]


@dataclass
class _PipelineContext(ABC):
    """What a custom function gets besides the action; in a step it is pipecut's ActionContext."""

    schedule_ref: PipelineSchedule
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


_PipelineContext.register(ActionContext)


class ForwardOnlyError(InputError, RuntimeError):
    """A loss was asked of a schedule that has none. It is a RuntimeError too, as with the peer."""


class _ScheduleForwardOnly(own.ScheduleForwardOnly):
    """Forwards only, and no loss."""

    def _check_given(self, given: Given) -> None:
        passed = {"target": given.target, "losses": given.losses}
        names = [name for name, value in passed.items() if value is not None]
        if names:
            raise ForwardOnlyError(
                f"Forward-only schedule does not support loss computation, and got {' and '.join(names)}: leave out "
                f"{' and '.join(names)}, or call eval() of another schedule, such as ScheduleGPipe, with loss_fn="
            )
        super()._check_given(given)


class _CustomFunctionProtocol(Protocol):
    def __call__(self, action: PeerAction, ctx: _PipelineContext) -> None: ...


def _add_unshard_reshard(compute_actions: Iterable[PeerAction | None], max_active_stages: int = 3) -> PeerRow:
    return peer_passes.unshard_reshard(compute_actions, max_active_stages)


def _add_reduce_grad(actions: Iterable[PeerAction | None], n_microbatches: int) -> PeerRow:
    return peer_passes.reduce_grad(actions, n_microbatches)


def _merge_bw(compute_actions: Iterable[PeerAction | None]) -> PeerRow:
    return peer_passes.merge_bw(compute_actions)


def _add_send_recv(compute_actions: _Order, stage_to_rank: _RankOf, num_stages: int) -> PeerOrder:
    return peer_passes.send_recv(compute_actions, stage_to_rank, num_stages)


def _defer_recv_ops(actions: _Order, stage_to_rank: _RankOf) -> PeerOrder:
    return peer_passes.defer_recv_ops(actions, stage_to_rank)


def _simulate_comms_compute(pipeline_order: _Order, stage_to_rank: _RankOf, num_stages: int) -> PeerOrder:
    return peer_passes.simulate(pipeline_order, stage_to_rank, num_stages)


def _validate_schedule(actions: _Order, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    return peer_passes.validate_schedule(actions, pp_group_size, num_stages, num_microbatches)


def _format_pipeline_order(pipeline_order: _Order, error_step_number: int | None = None) -> str:
    return peer_passes.format_order(pipeline_order, error_step_number)


def _requires_reduce_grad(action_type: Op) -> bool:
    return action_type in (Op.FULL_BACKWARD, Op.BACKWARD_WEIGHT)


def _get_profiler_function_name(action: PeerAction) -> str:
    return f"PP:{action}"


def _check_torch_compile_compatibility(stages: list[PipelineStage], schedule_name: str) -> None:
    refuse_compiled(stages, schedule_name)


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work | None]:
    """Begin transfers: sends only, or receives only, one by one; both in one batch, which cannot deadlock."""
    kinds = {op.op for op in p2p_ops}
    if not p2p_ops:
        return []
    if len(kinds) > 1:
        return list(dist.batch_isend_irecv(p2p_ops))
    return [_begin(op) for op in p2p_ops]


def _begin(op: dist.P2POp) -> dist.Work | None:
    # None where the other end of the transfer is outside of the group.
    if op.op in (dist.isend, torch.distributed.distributed_c10d.isend):
        return dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
    return dist.irecv(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)


def _sorted_batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> dict[int, list[dist.Work | None]]:
    """Begin transfers, those with one peer together, in the order of peers; the works by peer."""
    peers = sorted({op.peer for op in p2p_ops})
    return {peer: _batch_p2p([op for op in p2p_ops if op.peer == peer], desc) for peer in peers}


def _wait_batch_p2p(work: Iterable[Any]) -> None:
    for each in work:
        if each is not None:
            each.wait()


def _dump_chrometrace(schedule: _Order, filename: str) -> None:
    """Write an order as a Chrome trace in which every action takes one unit."""
    kinds = {True: "computation", False: "communication"}
    events: list[dict[str, Any]] = [
        {"name": str(action), "cat": kinds[action.is_compute_op], "ph": "X", "ts": step, "dur": 1}
        | {"pid": rank, "tid": rank}
        for rank in sorted(schedule)
        for step, action in enumerate(schedule[rank])
        if action is not None
    ]
    if not isinstance(filename, str):
        raise InputError(f"_dump_chrometrace() takes the name of a file, got {filename!r}")
    with open(filename, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
