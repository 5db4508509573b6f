"""The schedules by name: a class for every registered family of plans, and one for plans of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..errors import CompiledStageError, InputError
from ..schedule import FAMILIES, Family, Plan, known_name, plan_for
from ..stage import PipelineStage, is_initialized
from ..torch_internals import is_compiled_whole
from .connection import as_list
from .loss import LossWeight
from .schedule import PipelineSchedule
from .transport import TransportOption


class FamilySchedule(PipelineSchedule):
    """A schedule whose plan is that of a registered family, for the number of stages, ranks and microbatches."""

    family: ClassVar[Family | None] = None

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        ranks: int | None = None,
        check_loss: bool = True,
        timeout: float = 600.0,
        random_numbers: str | None = None,
        loss_weight: LossWeight | None = None,
        target_chunk_spec: Any = None,
        ties: Sequence[Mapping[int, str]] = (),
        transport: TransportOption = None,
    ) -> None:
        plan = self._make_plan(self._checked_stages(stages), n_microbatches, ranks)
        super().__init__(
            stages,
            plan,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            check_loss=check_loss,
            timeout=timeout,
            random_numbers=random_numbers,
            loss_weight=loss_weight,
            target_chunk_spec=target_chunk_spec,
            ties=ties,
            transport=transport,
        )

    @classmethod
    def _make_plan(cls, stages: Sequence[PipelineStage], n_microbatches: int, ranks: int | None) -> Plan:
        family = cls.family
        if family is None:
            names = ", ".join(FAMILIES)
            raise InputError(f"{cls.__name__} has no plan of its own: use one of {names}, or PlannedSchedule")
        if family.forbids_compiled:
            check_not_compiled(stages, cls.__name__)
        total = stages[0].num_stages
        if family.chunks == 2 and not family.any_chunks and len(stages) not in (2, total):
            raise InputError(
                f"{cls.__name__} has exactly 2 stages on each rank, in a V: got {len(stages)} of {total}. Rank 0 has "
                f"stages 0 and {total - 1}, or all of them if there is one process"
            )
        ranks = cls._count_ranks(family, stages) if ranks is None else ranks
        if total % ranks:
            raise InputError(
                f"{total} stages cannot be put evenly on {ranks} ranks; cut the model into a multiple of {ranks}"
            )
        return plan_for(family.name, ranks=ranks, chunks=total // ranks, microbatches=n_microbatches)

    @staticmethod
    def _count_ranks(family: Family, stages: Sequence[PipelineStage]) -> int:
        """Return the size of the process group; without one, or with one stage per rank, the number of stages."""
        one_stage_each = family.chunks == 1 and not family.any_chunks
        return stages[0].group_size if is_initialized() and not one_stage_each else stages[0].num_stages


def check_not_compiled(stages: Sequence[PipelineStage], schedule: str) -> None:
    """Raise on stages that are compiled as a whole, for a schedule that computes weight gradients later."""
    for stage in stages:
        if is_compiled_whole(getattr(stage, "submod", None)):
            raise CompiledStageError(
                f"{schedule} is not supported with a stage that torch.compile made one piece of: its weight gradients "
                "come along with those of its inputs, and cannot be left for idle time. Compile the blocks inside the "
                "stage, or use a schedule with full backwards, such as 1F1B or Interleaved1F1B"
            )


class PipelineScheduleSingle(FamilySchedule):
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
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(as_list(stage), n_microbatches, loss_fn, *specs, scale_grads, **options)


class PipelineScheduleMulti(FamilySchedule):
    """Base class of the schedules with one or more stages on each rank."""


class PlannedSchedule(PipelineSchedule):
    """A schedule from any plan: your own, or one from a CSV file."""


def get_schedule_class(schedule_name: str) -> type[FamilySchedule]:
    """Return the class of a schedule, by a name as `plan_for` takes them, in any case.

    >>> get_schedule_class("1f1b").__name__
    'Schedule1F1B'
    """
    return _class_of(FAMILIES[known_name(schedule_name)])


@cache
def _class_of(family: Family) -> type[FamilySchedule]:
    """Make the class of a registered family."""
    base = PipelineScheduleSingle if family.chunks == 1 else PipelineScheduleMulti
    return type(family.class_name, (base,), {"family": family, "__doc__": family.summary, "__module__": __name__})


globals().update({family.class_name: _class_of(family) for family in FAMILIES.values()})

if TYPE_CHECKING:  # type checkers cannot see classes that are made from the registry

    class ScheduleGPipe(PipelineScheduleSingle): ...

    class Schedule1F1B(PipelineScheduleSingle): ...

    class ScheduleZBH1(PipelineScheduleSingle): ...

    class ScheduleZBH2(PipelineScheduleSingle): ...

    class ScheduleForwardOnly(PipelineScheduleSingle): ...

    class ScheduleInterleaved1F1B(PipelineScheduleMulti): ...

    class ScheduleLoopedBFS(PipelineScheduleMulti): ...

    class ScheduleInterleavedZeroBubble(PipelineScheduleMulti): ...

    class ScheduleZBVZeroBubble(PipelineScheduleMulti): ...

    class ScheduleDualPipeV(PipelineScheduleMulti): ...

    class ScheduleVHalf(PipelineScheduleMulti): ...

    class ScheduleVMin(PipelineScheduleMulti): ...
