"""The Pipe that users get: a cut model whose stages can be built for a rank."""

from __future__ import annotations

from dataclasses import fields

import torch
import torch.distributed as dist

from .pipe_ir import pipe as pipe_ir
from .stage.stage import PipelineStage, build_stage


class Pipe(pipe_ir.Pipe):
    """A model cut into stages. Call it to run them one after the other; build stages to train them on ranks.

    >>> from torch import nn
    >>> from pipecut import pipeline
    >>> pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.ones(3, 4),), num_stages=2)
    >>> stage = pipe.build_stage(1, "cpu")
    >>> stage.stage_index, stage.is_last
    (1, True)
    """

    @classmethod
    def of(cls, pipe: pipe_ir.Pipe) -> Pipe:
        """The same cut model."""
        return cls(**{field.name: getattr(pipe, field.name) for field in fields(pipe)})

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: dist.ProcessGroup | None = None
    ) -> PipelineStage:
        """One stage, its module moved to the device, for a schedule."""
        return build_stage(self.get_stage_module(stage_index), stage_index, self.info(), device, group)
