"""The same cut, by pipecut and by torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import pipelining

import pipecut
from pipecut.pipe_ir.tracing.run import trace
from pipecut.split import cut_model, cuts_by_spec


def even_cuts(layers: int, stages: int) -> list[str]:
    """The modules of a GPT before which a cut gives stages with equally many layers.

    >>> even_cuts(12, 4)
    ['layers.3', 'layers.6', 'layers.9']
    """
    return [f"layers.{layers * stage // stages}" for stage in range(1, stages)]


def cut_ours(model: nn.Module, example: Tensor, cuts: list[str]) -> pipecut.Pipe:
    """The stages of pipecut."""
    return pipecut.pipeline(model, (example,), split_spec=dict.fromkeys(cuts, pipecut.SplitPoint.BEGINNING))


def cut_and_rebuild(model: nn.Module, example: Tensor, cuts: list[str]) -> pipecut.Pipe:
    """The stages of pipecut with every module written anew from its traced operations, as if a cut went through it."""
    traced = trace(model, (example,))
    plan = cuts_by_spec(traced, dict.fromkeys(cuts, pipecut.SplitPoint.BEGINNING))
    return cut_model(traced, plan, keep_modules=False)


def cut_by_upstream(model: nn.Module, example: Tensor, cuts: list[str]) -> UpstreamPipe:
    """Upstream's stages. It patches the model: give it a fresh one each time."""
    pipe = pipelining.pipeline(model, (example,), split_spec=dict.fromkeys(cuts, pipelining.SplitPoint.BEGINNING))
    return UpstreamPipe([pipe.get_stage_module(index) for index in range(pipe.num_stages)])


class UpstreamPipe:
    """Upstream's stage modules, called one after the other."""

    def __init__(self, stages: list[nn.Module]) -> None:
        self.stages = stages

    def __call__(self, value: Any) -> Any:
        for stage in self.stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        return value
