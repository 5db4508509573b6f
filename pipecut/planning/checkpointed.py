"""Stages that keep only what they receive, and compute their activations again for the backward."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

from ..errors import InputError
from ..pipe_ir.traced import TracedModel
from ..split.state import changed_state
from ..stage.stage import PipelineStage


def check_runs_twice(traced: TracedModel) -> None:
    """Refuse a model whose forward changes its state: it may have been planned in another mode."""
    changed = sorted(changed_state(traced))
    if changed:
        raise InputError(
            f"this plan computes activations again, and the forward of the model, in its mode of now, changes "
            f"{changed[0]!r}: it would be changed twice; put the model in evaluation mode, or make the plan again "
            "with the model in the mode in which it trains"
        )


def checkpoint_stage(stage: PipelineStage) -> None:
    """Let a stage's module run under a checkpoint; its names stay as they are."""
    module = stage.submod
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
