"""torch.distributed.pipelining.stage over pipecut's stages."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..pipe_ir import PipeInfo
from ..stage import PipelineStage as _OwnStage
from . import _backward, _debug, _utils
from .imported_names import imported_by
from .stage_calls import UpstreamStage
from .unsupported import replaced

__all__ = ["PipelineStage", "build_stage"]

_WeightRunner = Callable[[], None]


class _PipelineStageBase(UpstreamStage, ABC):
    """Base class of stages, also of a user's own."""

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], _WeightRunner] | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group, dw_builder=dw_builder)

    # Upstream prepares buffers in these. Ours follow from the sizes of each step, and nothing calls them.

    @abstractmethod
    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    @abstractmethod
    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any: ...


class PipelineStage(_PipelineStageBase):
    """A module as one stage of a pipeline; see pipecut.PipelineStage."""

    __init__ = UpstreamStage.__init__  # with all arguments, of which the abstract base takes a few
    __signature__ = inspect.signature(_OwnStage)

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return None


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


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """Build a stage of a traced model from its module and `pipe.info()`."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)


def _normalize_model_output_as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)


_RecvInfo = replaced("_RecvInfo", "what a stage receives is decided by its schedule's executor")

# Names that upstream's module has by its imports.
logger = logging.getLogger(__name__)
InferenceMode = _utils.InferenceMode
GetMeshCallback = _utils.GetMeshCallback
PipeliningMetadataError = _utils.PipeliningMetadataError
TensorMeta = _utils.TensorMeta
_TensorMeta = _utils._TensorMeta
_DTensorMeta = _utils._DTensorMeta
_MeshCache = _utils._MeshCache
_StageMeta = _utils._StageMeta
_StageForwardMeta = _utils._StageForwardMeta
_StageBackwardMeta = _utils._StageBackwardMeta
_derive_grad_metas = _utils._derive_grad_metas
_make_tensor_from_meta = _utils._make_tensor_from_meta
extract_tensor_meta = _utils.extract_tensor_meta
extract_tensor_metas = _utils.extract_tensor_metas
flatten_args = _utils.flatten_args
to_local_if_dtensor = _utils.to_local_if_dtensor
validate_and_normalize_to_tuple = _utils.validate_and_normalize_to_tuple
validate_static_arg_grad_correspondence = _utils.validate_static_arg_grad_correspondence
validate_tensors_metadata = _utils.validate_tensors_metadata
map_debug_info = _debug.map_debug_info
stage_backward = _backward.stage_backward
stage_backward_input = _backward.stage_backward_input
stage_backward_weight = _backward.stage_backward_weight
_autograd_grad_for_inputs = _backward._autograd_grad_for_inputs

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
