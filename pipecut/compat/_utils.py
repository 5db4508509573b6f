"""torch.distributed.pipelining._utils: placements, what is known of tensors, and checks of it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ..pipe_ir.pipe import PipeInfo
from ..schedule.placement import Placement
from ..stage.microbatch.distributed_tensor import is_distributed
from . import tensor_meta
from .tensor_meta import PipeliningMetadataError, _DTensorMeta, _TensorMeta

__all__ = [
    "InferenceMode",
    "PipeInfo",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "_DTensorMeta",
    "_MeshCache",
    "_StageBackwardMeta",
    "_StageForwardMeta",
    "_StageMeta",
    "_TensorMeta",
    "extract_tensor_metas",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "to_local_if_dtensor",
    "validate_and_normalize_to_tuple",
    "validate_metadata",
    "validate_static_arg_grad_correspondence",
    "validate_tensors_metadata",
]

PipeliningShapeError = PipeliningMetadataError  # its older name
InferenceMode = tensor_meta.InferenceMode
TensorMeta = tensor_meta.TensorMeta
GetMeshCallback = tensor_meta.GetMeshCallback
MeshCacheKey = tensor_meta.MeshKey
logger = logging.getLogger(__name__)
_MeshCache = tensor_meta._MeshCache
_StageMeta = tensor_meta._StageMeta
_StageForwardMeta = tensor_meta._StageForwardMeta
_StageBackwardMeta = tensor_meta._StageBackwardMeta


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """The rank of each stage: round and round ("loop"), or down and up ("v").

    >>> generate_stage_to_rank_mapping(2, 4, "v")
    {0: 0, 1: 1, 2: 1, 3: 0}
    """
    styles = {"loop": Placement.loop, "v": Placement.v}
    if style not in styles:
        raise ValueError(f"Style {style} is not supported: use one of {', '.join(styles)}")
    if style == "v" and num_stages % pp_size:
        raise ValueError(f"num_stages={num_stages} is no multiple of pp_size={pp_size}, which style 'v' needs")
    chunks = -(-num_stages // pp_size)
    return dict(enumerate(styles[style](pp_size, chunks).rank_of[:num_stages]))


def generate_rank_to_stage_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, list[int]]:
    """The stages of each rank that has any."""
    held: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        held.setdefault(rank, []).append(stage)
    return held


def flatten_args_detach(args: Any) -> tuple[Any, list[Any]]:
    """The same value over tensors cut off from their graphs, and its leaves."""
    detached = tree_map(lambda leaf: _detached(leaf) if isinstance(leaf, Tensor) else leaf, args)
    return detached, tree_flatten(detached)[0]


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """The leaves of a nested value; with `detach` as `flatten_args_detach`."""
    return flatten_args_detach(args) if detach else tree_flatten(args)[0]


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def to_local_if_dtensor(tensor: Tensor, detach: bool = False) -> Tensor:
    """The shard of this rank of a DTensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return local.detach() if detach else local


def extract_tensor_meta(tensor: Tensor) -> TensorMeta:
    """What is known of one tensor."""
    if not isinstance(tensor, Tensor):
        raise PipeliningMetadataError(f"expected a tensor, got {_kind(tensor)}: pass other values as keyword arguments")
    return _DTensorMeta.from_dtensor(tensor) if is_distributed(tensor) else _TensorMeta.from_tensor(tensor)


def extract_tensor_metas(tensors: Any, *, allow_none: bool = False) -> tuple[TensorMeta | None, ...] | None:
    """What is known of each tensor."""
    if tensors is None:
        return None
    if not allow_none and any(tensor is None for tensor in tensors):
        raise PipeliningMetadataError("a tensor is None: pass allow_none=True where there may be none")
    return tuple(None if tensor is None else extract_tensor_meta(tensor) for tensor in tensors)


def _derive_grad_metas(tensor_metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta | None, ...]:
    return tuple(meta.as_gradient() if meta.requires_grad else None for meta in tensor_metas)


def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> tuple[Tensor | None, ...] | None:
    """A tensor, or several, as a tuple."""
    if args is None:
        return None
    if not isinstance(args, Tensor | tuple | list):
        raise PipeliningMetadataError(f"stage args are a tensor, or a tuple or list of tensors; got {_kind(args)}")
    values = (args,) if isinstance(args, Tensor) else tuple(args)
    for place, value in enumerate(values):
        if not isinstance(value, Tensor) and not (value is None and allow_none):
            raise PipeliningMetadataError(
                f"stage arg[{place}] is {_kind(value)}, not a tensor: pass other values as keyword arguments"
            )
    return values


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def validate_metadata(
    desc: str,
    expected: TensorMeta,
    actual: Tensor | TensorMeta | None,
    *,
    raise_on_mismatch: bool = False,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """The differences between a tensor and what is expected of it. Whether it needs a gradient does not count."""
    diff = expected.get_diff(extract_tensor_meta(actual) if isinstance(actual, Tensor) else actual)
    if diff and raise_on_mismatch:
        raise PipeliningMetadataError(f"{desc}: {'; '.join(diff)}")
    if diff and warn_on_mismatch:
        warnings.warn(f"{desc}: Metadata mismatch. {'; '.join(diff)}. What arrives is used as it is.", stacklevel=2)
    return diff


def validate_tensors_metadata(
    desc: str,
    expected: tuple[TensorMeta | None, ...],
    actual: tuple[Tensor | TensorMeta | None, ...],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """The differences of several tensors."""
    if len(expected) != len(actual):
        return _told([f"{desc}: expected {len(expected)} tensors, got {len(actual)}"], raise_on_mismatch)
    found: list[str] = []
    for place, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        if wanted is None or got is None:
            if wanted is not got:
                kinds = ("None", "metadata") if wanted is None else ("metadata", "None")
                found += _told([f"{desc}[{place}]: expected {kinds[0]}, got {kinds[1]}"], raise_on_mismatch)
            continue
        found += validate_metadata(
            f"{desc}[{place}]",
            wanted,
            got,
            raise_on_mismatch=raise_on_mismatch,
            warn_on_mismatch=warn_on_mismatch,
        )
    return found


def _told(faults: list[str], raise_on_mismatch: bool) -> list[str]:
    if raise_on_mismatch:
        raise PipeliningMetadataError("; ".join(faults))
    return faults


def validate_static_arg_grad_correspondence(
    stage_index: int, args: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], is_input: bool
) -> None:
    """Refuse gradients that do not belong to the tensors that they are given for."""
    side = "input" if is_input else "output"
    if len(args) != len(grads):
        raise PipeliningMetadataError(
            f"Stage {stage_index}: {side}_grads length ({len(grads)}) does not match {side}_args length ({len(args)}): "
            "give one gradient for each tensor, None where there is none"
        )
    for place, (value, grad) in enumerate(zip(args, grads, strict=True)):
        if grad is not None and not value.requires_grad:
            raise PipeliningMetadataError(
                f"Stage {stage_index}: {side}_args[{place}] has requires_grad=False, but {side}_grads[{place}] is not "
                "None: a tensor that needs no gradient has None there"
            )
        if grad is None and value.requires_grad:
            warnings.warn(
                f"Stage {stage_index}: {side}_args[{place}] has requires_grad=True, but {side}_grads[{place}] is None",
                stacklevel=2,
            )


def _make_tensor_from_meta(meta: TensorMeta, device: torch.device | str) -> Tensor:
    return meta.to_tensor(device)
