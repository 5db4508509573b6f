"""One value cut into consecutive rows, and which values can be cut at all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...pipe_ir.structure import flatten
from .block_mask import batch_of, cut_block_mask, is_block_mask
from .chunk_spec import Replicate, TensorChunkSpec
from .distributed_tensor import cut_distributed, is_distributed
from .spec_match import Rule

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
        return list(cut_block_mask(value, ranges))
    if is_distributed(value):
        return list(cut_distributed(value, dim, ranges))
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
