"""Whether stages belong together, and to a plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ...errors import InputError, PipeWarning
from ...stage.peer_attributes import is_initialized
from ...stage.stage import PipelineStage
from ..action import Op
from ..plan import Plan


def is_stage(value: object) -> bool:
    """Whether a value is a stage, or says where one would be: that will do to make a schedule and look at its order."""
    return isinstance(value, PipelineStage) or all(
        isinstance(getattr(value, name, None), int) for name in ("num_stages", "group_size")
    )


def as_list(stages: Any) -> list[PipelineStage]:
    """One stage, or several, as a list. A mock of a stage can be iterated over too, and is one."""
    return list(stages) if isinstance(stages, Iterable) and not is_stage(stages) else [stages]


def is_complete(stage: object) -> bool:
    """Whether a stage was made by PipelineStage, and not only has what an order of actions takes."""
    return isinstance(stage, PipelineStage) and {"submod", "flights"} <= vars(stage).keys()


def checked(stages: Sequence[PipelineStage]) -> Sequence[PipelineStage]:
    """The stages of a schedule, if they are a list of stages of one pipeline."""
    if not isinstance(stages, Sequence):
        raise InputError(f"stages is a list of the stages of this rank, got {type(stages).__name__}: give [stage]")
    if not stages:
        raise InputError("a schedule needs the stages of this rank; got none")
    for stage in stages:
        if not is_stage(stage):
            raise InputError(f"a schedule takes PipelineStages, got {type(stage).__name__}: see pipe.build_stage()")
    totals = {stage.num_stages for stage in stages}
    if len(totals) > 1:
        raise InputError(f"the stages are of pipelines with different numbers of stages: {sorted(totals)}")
    return stages


def are_nowhere_else(stages: Sequence[PipelineStage]) -> bool:
    """Whether others are missing that no rank can hold, for there is a process group, and it has one rank only."""
    first = stages[0]
    return is_initialized() and first.group_size == 1 and len(stages) < first.num_stages


def check_stages(stages: Sequence[PipelineStage], plan: Plan, *, in_process: bool, distributed: bool) -> None:
    """Refuse stages that are not those of the plan."""
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
        raise InputError(f"stage {twice[0]} is there twice")
    if not in_process and not distributed:
        missing = sorted(set(range(plan.stages)) - set(indices))
        raise InputError(
            f"stages {missing} are missing, and there is no rank that could hold them: without torch.distributed, or "
            "on one rank, a schedule takes all stages. On many ranks, call torch.distributed.init_process_group() "
            "before, with world_size= their number"
        )


class CompiledStageError(InputError, RuntimeError):
    """A compiled stage in a schedule that would gain nothing from it. It is a RuntimeError too, as with the peer."""


def refuse_compiled(stages: Sequence[PipelineStage], schedule: str) -> None:
    """Refuse stages that are compiled as a whole, for a schedule that lives from weight gradients computed later."""
    for stage in stages:
        if type(getattr(stage, "submod", None)).__name__ == "OptimizedModule":
            raise CompiledStageError(
                f"{schedule} is not supported with a stage that torch.compile made one piece of: its weight gradients "
                "come along with those of its inputs, and cannot be left for idle time. Compile the blocks inside the "
                "stage, or use a schedule with full backwards, such as 1F1B or Interleaved1F1B"
            )


def _splits_backward(plan: Plan) -> bool:
    leaves = (leaf for row in plan.actions for action in row if action is not None for leaf in action.leaves)
    return any(leaf.op is Op.BACKWARD_INPUT for leaf in leaves)


def _warn_of_compiled(plan: Plan, stages: Sequence[PipelineStage]) -> None:
    """The gradients are right, but the schedule cannot do what it is for."""
    compiled = [stage.stage_index for stage in stages if any(map(_is_compiled, stage.submod.modules()))]
    if compiled:
        which = f"stage {compiled[0]} has" if len(compiled) == 1 else f"stages {compiled} have"
        warnings.warn(
            f"{which} modules compiled by torch.compile. The backward of each is one piece: its weight gradients are "
            f"computed along with those of its inputs, and are not left for the idle time that {plan.name} fills with "
            "them. A schedule with full backwards, such as 1F1B or Interleaved1F1B, does the same with less memory",
            PipeWarning,
            stacklevel=2,
        )


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, or in place by `module.compile()`."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
