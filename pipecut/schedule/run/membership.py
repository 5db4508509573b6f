"""Whether stages belong together, and to a plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from ...errors import InputError, PipeWarning
from ...stage.stage import PipelineStage
from ..action import Op
from ..plan import Plan


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
            f"stages {missing} are missing: without torch.distributed a schedule takes all stages. On many ranks, "
            "call torch.distributed.init_process_group() before"
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
