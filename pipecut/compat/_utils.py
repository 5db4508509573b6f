"""torch.distributed.pipelining._utils: placements, metadata of tensors and pipes, and checks of it."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import pipe_ir
from ..errors import InputError
from ..pipe_ir import Ref, Template, flatten
from ..schedule import Placement
from ..stage import check_gradients, is_distributed, tensors_of
from ..torch_internals import pytree
from . import tensor_meta
from .imported_names import imported_by
from .tensor_meta import PipeliningMetadataError, _DTensorMeta, _TensorMeta
from .unsupported import ReplacedAttributes

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


@dataclass(frozen=True)
class FlatOutput:
    """The leaves of an output that are handed over: every tensor once, in their order."""

    places: tuple[int, ...]

    @classmethod
    def of(cls, output: Template) -> FlatOutput:
        """Find the places of the values in the output of a traced model.

        Two places that hold one value are known from the trace. At run time two tensors may be one in some mode only,
        such as what goes into a dropout and what comes out of it.
        """
        first = {leaf.index: place for place, leaf in reversed(list(enumerate(output.leaves))) if isinstance(leaf, Ref)}
        return cls(tuple(sorted(first.values())))

    def select(self, result: Any) -> Any:
        """Return the tensors of a result: one alone as itself, several as a tuple.

        >>> FlatOutput((0, 2)).select({"logits": 1.5, "cache": (None, 2.5)}), FlatOutput((0,)).select((1.5, "text"))
        ((1.5, 2.5), 1.5)
        """
        leaves, _ = flatten(result, holders=True)
        kept = tuple(leaves[place] for place in self.places)
        return kept[0] if len(kept) == 1 else kept


@dataclass(frozen=True)
class PipeInfo(pipe_ir.PipeInfo, ReplacedAttributes):
    """All that is known of a Pipe without its modules. Stages that are built with it hand over tensors only."""

    flat_output: FlatOutput | None = None
    has_loss_and_backward: bool = False  # a traced model holds no backward here either: it is the schedule's

    _replaced = {
        "graph": "what the stages are and what goes between them is in `stages` and `edges`, their code in "
        "pipe.print_readable()"
    }

    @classmethod
    def of(cls, info: pipe_ir.PipeInfo, flat_output: FlatOutput) -> PipeInfo:
        """Add upstream's attributes to the info of a Pipe whose output is handed over flat."""
        return cls(**{field.name: getattr(info, field.name) for field in fields(info)}, flat_output=flat_output)


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """Return the rank of each stage: round and round ("loop"), or down and up ("v").

    >>> generate_stage_to_rank_mapping(2, 4, "v")
    {0: 0, 1: 1, 2: 1, 3: 0}
    """
    styles = {"loop": Placement.loop, "v": Placement.v}
    if style not in styles:
        raise InputError(f"Style {style} is not supported: use one of {', '.join(styles)}")
    if style == "v" and num_stages % pp_size:
        raise InputError(
            f"num_stages={num_stages} must be evenly divisible by pp_size={pp_size} in style 'v', with equally many "
            "on every rank: take a multiple, or style 'loop'"
        )
    chunks = -(-num_stages // pp_size)
    return dict(enumerate(styles[style](pp_size, chunks).rank_of[:num_stages]))


def generate_rank_to_stage_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, list[int]]:
    """Return the stages of each rank that has any."""
    held: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        held.setdefault(rank, []).append(stage)
    return held


def flatten_args_detach(args: Any) -> tuple[Any, list[Any]]:
    """Return the value with its tensors detached from their graphs, and its leaves."""
    detached = pytree.tree_map(lambda leaf: _detached(leaf) if isinstance(leaf, Tensor) else leaf, args)
    return detached, pytree.tree_flatten(detached)[0]


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """Return the leaves of a nested value; with `detach` as `flatten_args_detach`."""
    return flatten_args_detach(args) if detach else pytree.tree_flatten(args)[0]


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def to_local_if_dtensor(tensor: Tensor, detach: bool = False) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return local.detach() if detach else local


def extract_tensor_meta(tensor: Tensor) -> TensorMeta:
    """Return the metadata of a tensor."""
    if not isinstance(tensor, Tensor):
        raise PipeliningMetadataError(f"expected a tensor, got {_kind(tensor)}: pass other values as keyword arguments")
    return _DTensorMeta.from_dtensor(tensor) if is_distributed(tensor) else _TensorMeta.from_tensor(tensor)


def extract_tensor_metas(tensors: Any, *, allow_none: bool = False) -> tuple[TensorMeta | None, ...] | None:
    """Return the metadata of each tensor."""
    if tensors is None:
        return None
    for place, tensor in enumerate(tensors):
        if tensor is None and not allow_none:
            raise PipeliningMetadataError(
                f"None values are not allowed here, and tensor {place} is None: pass allow_none=True where there may "
                "be none"
            )
    # A value that is not a tensor has no metas: where there may be none, it counts as none.
    return tuple(
        None if allow_none and not isinstance(tensor, Tensor) else extract_tensor_meta(tensor) for tensor in tensors
    )


def _derive_grad_metas(tensor_metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta | None, ...]:
    return tuple(meta.as_gradient() for meta in tensor_metas)


def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> tuple[Tensor | None, ...] | None:
    """Return a tensor, or several, as a tuple."""
    return tensors_of(args, "Stage arg", allow_none=allow_none)


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
    """Return the differences between a tensor and its expected metadata; `requires_grad` does not count."""
    meta = extract_tensor_meta(actual) if isinstance(actual, Tensor) else actual
    if type(meta) is not type(expected):
        kind, diff = "Metadata type mismatch", [f"type: expected {type(expected).__name__}, got {type(meta).__name__}"]
    else:
        kind, diff = "Metadata mismatch", expected.get_diff(meta)
    if diff:
        text = "; ".join(diff)
        warning = f"{desc}: {kind}. {text}. What arrives is used as it is." if warn_on_mismatch else None
        _tell(f"{desc}: {text}", warning, raise_on_mismatch)
    return diff


def _tell(fault: str, warning: str | None, raise_on_mismatch: bool) -> None:
    if raise_on_mismatch:
        raise PipeliningMetadataError(fault)
    if warning is not None:
        warnings.warn(warning, stacklevel=3)


def validate_tensors_metadata(
    desc: str,
    expected: tuple[TensorMeta | None, ...],
    actual: tuple[Tensor | TensorMeta | None, ...],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Return the differences of several tensors."""
    if len(expected) != len(actual):
        fault = f"{desc}: expected {len(expected)} tensors, got {len(actual)}"
        _tell(fault, fault if warn_on_mismatch else None, raise_on_mismatch)
        return [fault]
    found: list[str] = []
    for place, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        if wanted is None and got is None:
            continue
        if wanted is None or got is None:
            kinds = ("None", "metadata") if wanted is None else ("metadata", "None")
            fault = f"{desc}[{place}]: expected {kinds[0]}, got {kinds[1]}"
            _tell(fault, fault if warn_on_mismatch else None, raise_on_mismatch)
            found.append(fault)
            continue
        found += validate_metadata(
            f"{desc}[{place}]",
            wanted,
            got,
            raise_on_mismatch=raise_on_mismatch,
            warn_on_mismatch=warn_on_mismatch,
        )
    return found


def validate_static_arg_grad_correspondence(
    stage_index: int, args: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], is_input: bool
) -> None:
    """Raise on gradients that do not fit the tensors that they are given for."""
    check_gradients(stage_index, args, grads, is_input=is_input)


def _make_tensor_from_meta(meta: TensorMeta, device: torch.device | str) -> Tensor:
    return meta.memory(device)


if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
