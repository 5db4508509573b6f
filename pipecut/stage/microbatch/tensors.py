"""One value cut into consecutive rows, and which values can be cut at all."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import InputError
from ...pipe_ir import flatten
from .spec import Replicate, Rule, TensorChunkSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import TypeIs


# MERGED: BlockMasks of flex attention, cut along their batch.


_MaskMod = Callable[[Any, Any, Any, Any], Any]


def is_block_mask(value: Any) -> TypeIs[BlockMask]:
    """Whether a value is a BlockMask. Their module is slow to import; while it is not there, there is no BlockMask."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def batch_of(mask: BlockMask) -> int:
    """The number of samples that a mask tells apart; 1 where it is the same for all of them."""
    return mask.kv_indices.shape[0] if mask.kv_indices.dim() == 4 else 1


def _cut_block_mask(mask: BlockMask, ranges: Sequence[tuple[int, int]]) -> list[BlockMask]:
    """Masks of ranges (start, size) of samples; `mask_mod` sees a sample under its number in the whole batch.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> lengths = torch.tensor([2, 3, 4])
    >>> mask = create_block_mask(lambda b, h, q, k: k < lengths[b], B=3, H=None, Q_LEN=4, KV_LEN=4, device="cpu")
    >>> first, second = _cut_block_mask(mask, [(0, 2), (2, 1)])
    >>> first.shape, second.shape
    ((2, 1, 4, 4), (1, 1, 4, 4))
    >>> [bool(second.mask_mod(torch.tensor(0), 0, 0, key)) for key in range(5)]
    [True, True, True, True, False]
    """
    return [_rows(mask, start, size) for start, size in ranges]


def _rows(mask: BlockMask, start: int, size: int) -> BlockMask:
    # Which tensors a BlockMask has depends on the release of torch; all have the batch in front, or a 1 there.
    part = copy.copy(mask)
    batch = batch_of(mask)
    for name, value in vars(mask).items():
        if isinstance(value, torch.Tensor) and value.shape[0] == batch:
            setattr(part, name, value.narrow(0, start, size))
    part.mask_mod = _shifted(mask.mask_mod, start, mask.kv_indices.device)
    return part


def _shifted(mask_mod: _MaskMod, start: int, device: torch.device) -> _MaskMod:
    # A tensor, not a number: code compiled for one microbatch then serves the others too.
    offset = torch.tensor(start, dtype=torch.int32, device=device)

    def of_the_whole_batch(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_mod(sample + offset, head, query, key)

    return of_the_whole_batch


# MERGED: DTensors cut and put together: mesh and placements stay, and a row is the row of the global tensor.


def is_distributed(value: Any) -> TypeIs[DTensor]:
    """Whether a value is a DTensor. Their module is slow to import; while it is not there, there is no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _cut_distributed(tensor: DTensor, dim: int, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Views of ranges (start, size) of rows, placed as the tensor is.

    If `dim` is itself sharded, the rows of a microbatch are not on the ranks that must hold them: the tensor is
    gathered along that dim once, and each chunk sharded anew.
    """
    from torch.distributed.tensor import Replicate

    placements = tensor.placements
    whole = tensor
    if any(placement.is_shard(dim) for placement in placements):
        gathered = [Replicate() if placement.is_shard(dim) else placement for placement in placements]
        whole = tensor.redistribute(placements=gathered)
    return [_placed(whole.narrow(dim, start, size), placements) for start, size in ranges]


def join_distributed(chunks: Sequence[DTensor], dim: int) -> torch.Tensor:
    """Chunks that are placed alike, one after the other, placed as they are."""
    return _placed(torch.cat(list(chunks), dim), chunks[0].placements)


def _placed(tensor: Any, placements: Any) -> torch.Tensor:
    made: torch.Tensor = tensor if tensor.placements == placements else tensor.redistribute(placements=placements)
    return made


_OR_REPLICATE = "or give it the spec Replicate(), and every microbatch gets it whole"


def even_sizes(samples: int, chunks: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger ones first.

    >>> even_sizes(10, 4)
    (3, 3, 2, 2)
    """
    size, larger = divmod(samples, chunks)
    return (size + 1,) * larger + (size,) * (chunks - larger)


def cut_dim(name: str, value: Any, rule: Rule) -> int | None:
    """The dim along which a leaf is cut; None if every microbatch gets it whole."""
    if isinstance(rule.spec, Replicate):
        return None
    if isinstance(value, torch.Tensor):
        return _tensor_dim(name, value, rule)
    if is_block_mask(value):
        return _mask_dim(name, value, rule)
    _refuse_hidden_tensors(name, value)
    return None


def samples_of(value: Any, dim: int) -> int:
    """How many samples a leaf has along the dim in which it is cut."""
    return batch_of(value) if is_block_mask(value) else int(value.shape[dim])


def cut(value: Any, dim: int, sizes: Sequence[int]) -> list[Any]:
    """Consecutive rows of a tensor or BlockMask: views, through which a gradient reaches the whole tensor."""
    ranges = list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
    if is_block_mask(value):
        return list(_cut_block_mask(value, ranges))
    if is_distributed(value):
        return list(_cut_distributed(value, dim, ranges))
    # Not torch.split: autograd forbids in-place operations on views that one operation made several of.
    return [value.narrow(dim, start, size) for start, size in ranges]


def _tensor_dim(name: str, tensor: torch.Tensor, rule: Rule) -> int | None:
    _refuse_uncuttable(name, tensor)
    if tensor.dim() == 0 and not rule.exact:
        return None
    dim = rule.spec.split_dim if isinstance(rule.spec, TensorChunkSpec) else 0
    if not -tensor.dim() <= dim < tensor.dim():
        dims = f"dims 0 to {tensor.dim() - 1}" if tensor.dim() else "no dim"
        raise InputError(
            f"{name} cannot be cut along dim {dim}: its shape is {list(tensor.shape)}, with {dims}; correct the spec, "
            "or write Replicate()"
        )
    return dim % tensor.dim()


def _mask_dim(name: str, mask: Any, rule: Rule) -> int | None:
    dim = rule.spec.split_dim if isinstance(rule.spec, TensorChunkSpec) else 0
    if dim != 0:
        raise InputError(
            f"{name} is a BlockMask, whose samples are along dim 0: write TensorChunkSpec(0), "
            f"not TensorChunkSpec({dim})"
        )
    return 0 if batch_of(mask) > 1 else None


def _refuse_uncuttable(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise InputError(
            f"{name} is a nested tensor, of which microbatches cannot be cut: pass it padded "
            f"(torch.nested.to_padded_tensor) with the lengths in another argument, {_OR_REPLICATE}"
        )
    if tensor.is_quantized:
        raise InputError(
            f"{name} is a quantized tensor, of which microbatches cannot be cut: pass {name}.dequantize(), "
            f"or its int_repr() and quantize the microbatch in the model, {_OR_REPLICATE}"
        )
    if tensor.layout != torch.strided:
        raise InputError(
            f"{name} is a sparse tensor ({tensor.layout}), of which microbatches cannot be cut: "
            f"pass {name}.to_dense(), {_OR_REPLICATE}"
        )


def _refuse_hidden_tensors(name: str, value: Any) -> None:
    """An object whose samples cannot be reached would go to every microbatch with all of them."""
    if isinstance(value, type | nn.Module):
        return
    kind = type(value).__name__
    if hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0:
        raise InputError(f"{name} is of type {kind}, not a tensor: pass torch.as_tensor({name}), {_OR_REPLICATE}")
    inside, _ = flatten(getattr(value, "__dict__", None))
    if any(isinstance(leaf, torch.Tensor) for leaf in inside):
        raise InputError(
            f"{name} is of type {kind}, which holds tensors that cannot be reached: pass its tensors "
            f"in a dict, a tuple or a dataclass, {_OR_REPLICATE}"
        )
