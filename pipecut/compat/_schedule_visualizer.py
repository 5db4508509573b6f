"""torch.distributed.pipelining._schedule_visualizer over pipecut's plans and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..errors import InputError
from ..schedule import COMPUTE, Op, Plan, add_bubbles, drop_bubbles, look, render
from . import schedules as _schedules
from . import stage as _stage
from .actions import UpstreamAction, UpstreamOrder, UpstreamRow, order_from_upstream, order_to_upstream
from .imported_names import imported_by
from .schedules import PipelineScheduleSingle, _PipelineSchedule, get_schedule_class
from .stage import _PipelineStageBase

Chunks: TypeAlias = int | None  # the stages of each rank; None for as many as the schedule is made for


class OpKey(NamedTuple):
    """Key of an action."""

    stage_index: int
    computation_type: Op
    microbatch_index: int | None


@dataclass(frozen=True)
class _ComputationTypeVisual:
    """The colour of a kind of action in pictures, a text for it, and its width."""

    color: str
    text: str = ""
    width: int = 1


action_type_to_color_mapping = {op: _ComputationTypeVisual(look(op).fill, op.name) for op in Op if op in COMPUTE}

# Names that upstream's module has by its imports.
_Action = UpstreamAction
_ComputationType = Op
PipelineScheduleMulti = _schedules.PipelineScheduleMulti
PipelineStage = _stage.PipelineStage
_PipelineScheduleRuntime = _schedules._PipelineScheduleRuntime


class _OnPaper(_PipelineStageBase):
    """A stage that is only counted."""

    def __init__(self, stage_index: int, num_stages: int, group_rank: int, group_size: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_rank, self.group_size, self.group = group_rank, group_size, None

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any: ...

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any: ...


def get_schedule_ops(
    schedule: str | type[_PipelineSchedule],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: Chunks = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[UpstreamRow]:
    """Return the actions of every rank in a schedule, made without a model or a process group.

    >>> get_schedule_ops("GPipe", 2, 1, add_spacing=True)
    [[0F0, None, None, 0B0], [None, 1F0, 1B0, None]]
    """
    if add_spacing and with_comms:
        raise ValueError("Cannot add spacing and view comms at the same time: choose one of the two")
    kind = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    single = issubclass(kind, PipelineScheduleSingle)
    chunks = num_stages_per_rank if num_stages_per_rank is not None else 1 if single else 2
    _check_chunks(kind, chunks)
    total = chunks * pp_degree
    stages = [_OnPaper(chunk * pp_degree, total, 0, pp_degree) for chunk in range(chunks)]
    made: Any = kind(stages[0] if single else stages, num_microbatches)
    made._defer_pp_recv = defer_pp_recv
    order: UpstreamOrder = made.pipeline_order_with_comms if with_comms else made.pipeline_order
    if not order:
        raise InputError(f"{kind.__name__} has no order of actions: use a schedule that sets pipeline_order")
    rows = [order[rank] for rank in sorted(order)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


class StagesPerRankError(InputError, AssertionError):
    """A number of stages per rank that the schedule is not made for; also an AssertionError, as with upstream."""


def _check_chunks(kind: type[_PipelineSchedule], chunks: int) -> None:
    fixed = None if kind.family is None or kind.family.any_chunks else kind.family.chunks
    wanted = 1 if issubclass(kind, PipelineScheduleSingle) else fixed
    if wanted is not None and chunks != wanted:
        raise StagesPerRankError(
            f"Expected num_stages_per_rank to be {wanted}, got {chunks}: {kind.__name__} has {wanted} on each rank"
        )


def add_schedule_op_spacing(schedule: Sequence[Iterable[UpstreamAction | None]]) -> list[UpstreamRow]:
    """Add a None wherever a rank waits, if every action takes one slot."""
    rows = order_from_upstream(dict(enumerate(schedule)))
    computed = {rank: [action for action in row if action is None or action.is_compute] for rank, row in rows.items()}
    spaced = order_to_upstream(add_bubbles(drop_bubbles(Plan.from_actions(computed))).actions)
    return [spaced[rank] for rank in sorted(spaced)]


def visualize_schedule(schedule: Sequence[Iterable[UpstreamAction | None]], filename: str | None = None) -> None:
    """Draw the actions of every rank: in a file as SVG, otherwise as text in the terminal."""
    plan = Plan.from_actions(order_from_upstream(dict(enumerate(schedule))))
    if filename is None:
        print(plan.grid())
    else:
        render.svg(plan, filename)


if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
