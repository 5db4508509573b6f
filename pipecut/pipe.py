"""The Pipe that users get: a cut model whose stages can be built for a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
import torch.distributed as dist

from .pipe_ir import pipe as pipe_ir
from .stage import CheckpointLike, InitFunction, PipelineStage, Values, build_stage, materialize


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
        self,
        stage_index: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        *,
        init: InitFunction | None = None,
        checkpoint: CheckpointLike | None = None,
        dtype: torch.dtype | None = None,
        strict: bool = True,
        rename: Callable[[str], str] | None = None,
    ) -> PipelineStage:
        """One stage, its module moved to the device, for a schedule.

        A model that was made on the meta device, or under `pipecut.empty_weights()`, has no values; its stages get them
        here, each only its own, and the model stays as it is:

        - `init`: a function that is called with modules, children before their parents, as `model.apply` does. Random
          numbers depend on torch.initial_seed() and the module's name alone, not on the cut.
        - `checkpoint`: a safetensors file, a directory of them (with an index or without), a file of torch.save, a
          directory of torch.distributed.checkpoint, or a state dict. Only what the stage holds is read.

        Shapes and dtypes of a checkpoint must be the model's. `dtype=torch.float32` converts other floating point
        values to it, where it is the model's. `rename` turns the model's names into those of the checkpoint. With
        `strict=False` names may differ: what the checkpoint does not hold comes from `init`, or is as in the model.

        >>> from torch import nn
        >>> from pipecut import pipeline
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> pipe = pipeline(model, (torch.ones(3, 4),), num_stages=2)
        >>> def init(module: nn.Module) -> None:
        ...     if isinstance(module, nn.Linear):
        ...         module.reset_parameters()
        >>> stage = pipe.build_stage(1, "cpu", init=init)
        >>> list(stage.submod.state_dict()), stage.submod.get_parameter("1.weight").device
        (['1.weight', '1.bias'], device(type='cpu'))
        """
        values = Values(init, checkpoint, dtype, strict, rename)
        module = self.get_stage_module(stage_index)
        if values.given:
            module = materialize(self, stage_index, device, values)
        return build_stage(module, stage_index, self.info(), device, group)
