"""torch.distributed.pipelining.schedules over pipecut's schedules and plans."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import run as own
from ..errors import InputError, PlanError, warn
from ..run import FamilySchedule, StepState, check_not_compiled
from ..schedule import Dataflow, Op, Placement, Plan, add_reduce_grad
from ..stage import PipelineStage
from . import _utils, passes
from . import microbatch as _microbatch
from . import stage as _stage
from .actions import Order, UpstreamAction, format_order, validate_schedule
from .imported_names import imported_by
from .microbatch import TensorChunkSpec
from .orders import UpstreamSchedule, is_placed
from .steps import PipelineContext
from .unsupported import replaced

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

_Action = UpstreamAction
_ComputationType = Op
FORWARD = F = Op.FORWARD
BACKWARD_INPUT = I = Op.BACKWARD_INPUT  # noqa: E741 (upstream's name)
BACKWARD_WEIGHT = W = Op.BACKWARD_WEIGHT
FULL_BACKWARD = B = Op.FULL_BACKWARD
OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD = Op.OVERLAP_F_B, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD
SEND_F, RECV_F, SEND_B, RECV_B = Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B
_action_regex = re.compile(rf"(\d+)({'|'.join(op.value for op in Op if op is not Op.OVERLAP_F_B)})(\d*)")
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)

_PipelineSchedule = UpstreamSchedule
_PipelineContext = PipelineContext


class ForwardOnlyError(InputError, RuntimeError):
    """A loss was asked of a schedule that has none; also a RuntimeError, as with upstream."""


class PipelineScheduleSingle(UpstreamSchedule, own.PipelineScheduleSingle):
    """Base class of the schedules with one stage on each rank."""

    def __init__(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        stages = [stage] if is_placed(stage) else stage  # a mock of a stage can be iterated over too
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads, **options)

    def _shown_plan(self) -> Plan:
        """Return the plan with the reductions of gradients, which upstream shows for one stage on each rank."""
        plan = self.plan
        return add_reduce_grad(plan) if plan.training and plan.stages == plan.ranks else plan


class PipelineScheduleMulti(UpstreamSchedule, own.PipelineScheduleMulti):
    """Base class of the schedules with one or more stages on each rank; a user's own sets `pipeline_order`."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        **options: Any,
    ) -> None:
        if use_full_backward is not None:
            warn(
                "use_full_backward has no effect: backwards are whole (B) or in two parts (I, W) as the order of "
                "actions says. Leave it out"
            )
        if not backward_requires_autograd:
            raise InputError(
                "backward_requires_autograd=False is not known here: register a custom function for your backwards"
            )
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads, **options)

    @classmethod
    def _make_plan(cls, stages: Sequence[PipelineStage], n_microbatches: int, ranks: int | None) -> Plan:
        """Make the plan of the family; without one an empty plan, until the order of actions is set."""
        if cls.family is not None:
            return super()._make_plan(stages, n_microbatches, ranks)
        total = stages[0].num_stages
        placement = Placement((0,) * total)
        return Plan(cls.__name__, placement, n_microbatches, ((),), Dataflow.chain(total), training=True)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule whose order can be read and written with its messages."""


class _BuiltIn(_PipelineScheduleRuntime):
    """Base class of the built-in schedules, whose constructors have their own order of arguments."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        last = (None, scale_grads, backward_requires_autograd)
        super().__init__(stages, n_microbatches, loss_fn, *specs, *last, **options)
        self._defer_pp_recv = defer_pp_recv


class _ZeroBubble(_BuiltIn):
    """Base class of the built-in schedules that leave weight gradients for idle time."""

    use_full_backward = False


class ScheduleGPipe(PipelineScheduleSingle, own.ScheduleGPipe):
    """GPipe; see pipecut.ScheduleGPipe."""


class Schedule1F1B(PipelineScheduleSingle, own.Schedule1F1B):
    """1F1B; see pipecut.Schedule1F1B."""


class ScheduleInterleaved1F1B(_BuiltIn, own.ScheduleInterleaved1F1B):
    """Interleaved 1F1B; see pipecut.ScheduleInterleaved1F1B."""


class ScheduleInterleavedZeroBubble(_ZeroBubble, own.ScheduleInterleavedZeroBubble):
    """Interleaved zero bubble; see pipecut.ScheduleInterleavedZeroBubble."""


class ScheduleZBVZeroBubble(_ZeroBubble, own.ScheduleZBVZeroBubble):
    """ZBV zero bubble; see pipecut.ScheduleZBVZeroBubble."""


class ScheduleDualPipeV(_ZeroBubble, own.ScheduleDualPipeV):
    """DualPipeV; see pipecut.ScheduleDualPipeV."""


class ScheduleLoopedBFS(_BuiltIn, own.ScheduleLoopedBFS):
    """Looped BFS; its positional arguments leave out the specs of inputs. See pipecut.ScheduleLoopedBFS."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        **options: Any,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        last = (scale_grads, backward_requires_autograd, defer_pp_recv)
        super().__init__(stages, n_microbatches, loss_fn, *specs, *last, **options)


class _ScheduleForwardOnly(PipelineScheduleSingle, own.ScheduleForwardOnly):
    """Forwards only, and no loss."""

    def _check_batch(self, batch: StepState) -> None:
        passed = {"target": batch.targets, "losses": self._losses_to_fill}
        names = [name for name, value in passed.items() if value is not None]
        if names:
            raise ForwardOnlyError(
                f"Forward-only schedule does not support loss computation, and got {' and '.join(names)}: leave out "
                f"{' and '.join(names)}, or call eval() of another schedule, such as ScheduleGPipe, with loss_fn="
            )
        super()._check_batch(batch)


_BASES: dict[str, type[UpstreamSchedule]] = {
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
}
_CLASSES: dict[type[FamilySchedule], type[UpstreamSchedule]] = {
    own.ScheduleGPipe: ScheduleGPipe,
    own.Schedule1F1B: Schedule1F1B,
    own.ScheduleInterleaved1F1B: ScheduleInterleaved1F1B,
    own.ScheduleLoopedBFS: ScheduleLoopedBFS,
    own.ScheduleInterleavedZeroBubble: ScheduleInterleavedZeroBubble,
    own.ScheduleZBVZeroBubble: ScheduleZBVZeroBubble,
    own.ScheduleDualPipeV: ScheduleDualPipeV,
}


def _class_of(made: type[FamilySchedule]) -> type[UpstreamSchedule]:
    """Return the class that derives from one of pipecut, also from one that upstream does not have."""
    if made not in _CLASSES:
        base = PipelineScheduleSingle if issubclass(made, own.PipelineScheduleSingle) else _BuiltIn
        _CLASSES[made] = type(made.__name__, (base, made), {"__doc__": made.__doc__, "__module__": __name__})
    return _CLASSES[made]


def get_schedule_class(schedule_name: str) -> type[UpstreamSchedule]:
    """Return the class of a schedule, or one of two base classes, by its name in any case.

    >>> get_schedule_class("1f1b")
    <class 'pipecut.compat.schedules.Schedule1F1B'>
    """
    bases = {name.lower(): base for name, base in _BASES.items()}
    if isinstance(schedule_name, str) and schedule_name.lower() in bases:
        return bases[schedule_name.lower()]
    try:
        return _class_of(own.get_schedule_class(schedule_name))
    except PlanError as error:
        raise PlanError(f"{str(error).removesuffix('.')}, {', '.join(_BASES)}.") from None


# Names that upstream's module has by its imports.
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


class _CustomFunctionProtocol(Protocol):
    def __call__(self, action: UpstreamAction, ctx: _PipelineContext) -> None: ...


_add_unshard_reshard = passes.unshard_reshard
_add_reduce_grad = passes.reduce_grad
_merge_bw = passes.merge_bw
_add_send_recv = passes.send_recv
_defer_recv_ops = passes.defer_recv_ops
_simulate_comms_compute = passes.simulate
_validate_schedule = validate_schedule
_format_pipeline_order = format_order


def _requires_reduce_grad(action_type: Op) -> bool:
    return action_type in (Op.FULL_BACKWARD, Op.BACKWARD_WEIGHT)


def _get_profiler_function_name(action: UpstreamAction) -> str:
    return f"PP:{action}"


def _check_torch_compile_compatibility(stages: Sequence[PipelineStage], schedule_name: str) -> None:
    check_not_compiled(stages, schedule_name)


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
    """Begin transfers, those with one peer together, in the order of peers; return the works by peer."""
    peers = sorted({op.peer for op in p2p_ops})
    return {peer: _batch_p2p([op for op in p2p_ops if op.peer == peer], desc) for peer in peers}


def _wait_batch_p2p(work: Iterable[Any]) -> None:
    for each in work:
        if each is not None:
            each.wait()


def _dump_chrometrace(schedule: Order, filename: str) -> None:
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


if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
