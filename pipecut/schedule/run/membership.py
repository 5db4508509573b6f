"""Whether stages belong together, and to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InputError
from ...stage.stage import PipelineStage
from ..action import Op
from ..plan import Plan


def check_stages(stages: Sequence[PipelineStage], plan: Plan, *, in_process: bool, distributed: bool) -> None:
    """Refuse stages that are not those of the plan, or that it cannot run."""
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
        _refuse_compiled(plan, stages)
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


def _splits_backward(plan: Plan) -> bool:
    leaves = (leaf for row in plan.actions for action in row if action is not None for leaf in action.leaves)
    return any(leaf.op is Op.BACKWARD_INPUT for leaf in leaves)


def _refuse_compiled(plan: Plan, stages: Sequence[PipelineStage]) -> None:
    for stage in stages:
        compiled = [path for path, module in stage.submod.named_modules() if type(module).__name__ == "OptimizedModule"]
        if compiled:
            raise InputError(
                f"stage {stage.stage_index} has a module compiled by torch.compile ('{compiled[0]}'): its backward is "
                f"one piece, and {plan.name} does the gradients of inputs and weights apart: take a schedule with full "
                "backwards, such as 1F1B or Interleaved1F1B, or leave that stage uncompiled"
            )
