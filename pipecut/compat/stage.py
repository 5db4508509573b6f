"""torch.distributed.pipelining.stage over pipecut's stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..pipe_ir.pipe import PipeInfo
from ..stage.stage import PipelineStage, WeightRunner, build_stage
from .replaced import replaced

__all__ = ["PipelineStage", "build_stage"]


class _PipelineStageBase(PipelineStage, ABC):
    """A stage of one's own. Every PipelineStage counts as one."""

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], WeightRunner] | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group, dw_builder=dw_builder)

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return True if cls is _PipelineStageBase and issubclass(other, PipelineStage) else NotImplemented

    @abstractmethod
    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Called by nobody here: shapes follow from the sizes of each step."""

    @abstractmethod
    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """Called by nobody here."""

    @abstractmethod
    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """Called by nobody here."""


class _PipelineStage(PipelineStage):
    """A stage of a traced model."""

    def __init__(
        self,
        stage_module: nn.Module,
        stage_index: int,
        pipe_info: PipeInfo,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group=group, pipe_info=pipe_info)


def _normalize_model_output_as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)


_RecvInfo = replaced("_RecvInfo", "what a stage receives is decided by its schedule's executor")
