"""Stages that keep only what they receive, and compute their activations again for the backward."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

from ..stage.stage import PipelineStage


def checkpoint_stage(stage: PipelineStage) -> None:
    """Let a stage's module run under a checkpoint; its names stay as they are."""
    module = stage.submod
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
