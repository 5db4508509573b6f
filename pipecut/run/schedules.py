"""The schedules by name: each is a plan, and the one executor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..errors import InputError, PipeWarning
from ..schedule import FAMILIES, Family, Plan, known_name, plan_for
from ..stage import PipelineStage
from ..stage.peer_attributes import is_initialized
from .connection import as_list, checked, is_complete, refuse_compiled
from .schedule import PipelineSchedule


class _NamedSchedule(PipelineSchedule):
    """A schedule whose plan follows from its name and the sizes."""

    schedule_name: ClassVar[str] = ""
    refuses_compiled: ClassVar[bool] = False  # whether it gains nothing with a stage that is compiled as a whole

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
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        if not backward_requires_autograd:
            raise InputError(
                "backward_requires_autograd=False is not known here: register a custom function for your backwards"
            )
        if self.refuses_compiled:
            refuse_compiled(checked(stages), type(self).__name__)
        plan = self._plan(checked(stages), n_microbatches, ranks)
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, plan, loss_fn, *specs, scale_grads, n_microbatches=n_microbatches, **options)
        self._defer_pp_recv = defer_pp_recv

    @classmethod
    def _plan(cls, stages: Sequence[PipelineStage], n_microbatches: int, ranks: int | None) -> Plan | None:
        if not cls.schedule_name and issubclass(cls, PipelineScheduleMulti):
            return None  # it sets its order of actions itself
        if not cls.schedule_name:
            raise InputError(
                f"{cls.__name__} has no plan of its own: use one of {', '.join(_CLASSES)}, or PlannedSchedule"
            )
        total = stages[0].num_stages
        family = FAMILIES[cls.schedule_name]
        if family.chunks == 2 and not family.any_chunks and len(stages) not in (2, total):
            raise InputError(
                f"{cls.__name__} has exactly 2 stages on each rank, in a V: got {len(stages)} of {total}. Rank 0 has "
                f"stages 0 and {total - 1}, or all of them if there is one process"
            )
        ranks = ranks if ranks is not None else _ranks_for(stages, family)
        if total % ranks:
            raise InputError(
                f"{total} stages cannot be put evenly on {ranks} ranks; cut the model into a multiple of {ranks}"
            )
        return plan_for(cls.schedule_name, ranks=ranks, chunks=total // ranks, microbatches=n_microbatches)


def _ranks_for(stages: Sequence[PipelineStage], family: Family) -> int:
    """The size of the stages' process group; as many as there are stages without one, or if each rank has one stage."""
    one_stage_each = family.chunks == 1 and not family.any_chunks
    if one_stage_each or (all(map(is_complete, stages)) and not is_initialized()):
        return stages[0].num_stages
    return stages[0].group_size


class PipelineScheduleSingle(_NamedSchedule):
    """A schedule with one stage on each rank."""

    def _reduces_at_end(self) -> bool:
        return self.plan.training

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


class PipelineScheduleMulti(_NamedSchedule):
    """A schedule with one or more stages on each rank."""

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
            warnings.warn(
                "use_full_backward has no effect: backwards are whole (B) or in two parts (I, W) as the order of "
                "actions says. Leave it out",
                PipeWarning,
                stacklevel=2,
            )
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        options["backward_requires_autograd"] = backward_requires_autograd
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads, **options)


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule with one or more stages on each rank whose order can be read and written with its messages."""


class _NamedRuntime(PipelineScheduleRuntime):
    """One whose plan follows from its name; it has no use for `use_full_backward`."""

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
        options |= {"backward_requires_autograd": backward_requires_autograd, "defer_pp_recv": defer_pp_recv}
        super().__init__(stages, n_microbatches, loss_fn, *specs, None, scale_grads, **options)


class PlannedSchedule(PipelineSchedule):
    """A schedule from any plan: your own, or one from a CSV file."""


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    schedule_name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward, with as many activations as there are stages to come."""

    schedule_name = "1F1B"


class ScheduleZBH1(PipelineScheduleSingle):
    """ZB-H1: 1F1B with weight gradients in its bubbles, and no more memory."""

    schedule_name = "ZB-H1"


class ScheduleZBH2(PipelineScheduleSingle):
    """ZB-H2: no bubble at all, for twice the memory."""

    schedule_name = "ZB-H2"


class ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards only; `step` and `eval` are the same."""

    schedule_name = "ForwardOnly"


class ScheduleInterleaved1F1B(_NamedRuntime):
    """1F1B with several stages on each rank, in a loop."""

    schedule_name = "Interleaved1F1B"


class ScheduleLoopedBFS(_NamedRuntime):
    """GPipe with several stages on each rank, one stage after the other."""

    schedule_name = "LoopedBFS"

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        output_merge_spec: Any = None,  # here, as with the peer, positional arguments leave out the specs of inputs
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


class ScheduleInterleavedZeroBubble(_NamedRuntime):
    """Interleaved 1F1B with weight gradients in its bubbles."""

    schedule_name = "InterleavedZeroBubble"
    refuses_compiled = True
    use_full_backward = False


class ScheduleZBVZeroBubble(_NamedRuntime):
    """Two stages on each rank, in a V, with weight gradients in the bubbles."""

    schedule_name = "ZBVZeroBubble"
    refuses_compiled = True
    use_full_backward = False


class ScheduleDualPipeV(_NamedRuntime):
    """Two stages on each rank, in a V, forwards and backwards overlapped."""

    schedule_name = "DualPipeV"
    refuses_compiled = True
    use_full_backward = False


class ScheduleVHalf(_NamedRuntime):
    """Two stages on each rank, in a V, with half of the memory of 1F1B."""

    schedule_name = "V-Half"


class ScheduleVMin(_NamedRuntime):
    """Two stages on each rank, in a V, with a third of the memory of 1F1B."""

    schedule_name = "V-Min"


_ALL: tuple[type[_NamedSchedule], ...] = (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
    ScheduleForwardOnly,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleVHalf,
    ScheduleVMin,
)
_CLASSES: dict[str, type[PipelineSchedule]] = {schedule.schedule_name: schedule for schedule in _ALL}
_BASES: dict[str, type[PipelineSchedule]] = {
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class of a schedule, by a name as `plan_for` takes them, or one of two base classes, in any case.

    >>> get_schedule_class("1f1b").__name__
    'Schedule1F1B'
    """
    bases = {name.lower(): base for name, base in _BASES.items()}
    if isinstance(schedule_name, str) and schedule_name.lower() in bases:
        return bases[schedule_name.lower()]
    return _CLASSES[known_name(schedule_name, _BASES)]
