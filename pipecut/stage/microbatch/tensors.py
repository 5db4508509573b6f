"""Cut tensors, DTensors and BlockMasks into consecutive rows, and join, average or compare values of microbatches."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import InputError, MisfitError, NoSuchDimError, PlacementError
from ...pipe_ir import PLAIN_TYPES, flatten
from ...text import shape_text, tensor_text
from ..dtensor import is_distributed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import TypeIs


_MaskMod = Callable[[Any, Any, Any, Any], Any]
_Ranges = Sequence[tuple[int, int]]  # (start, size) of the rows of each microbatch

_OR_REPLICATE = "or give it the spec Replicate(), and every microbatch gets it whole"
_FOLD = "CustomReducer(init_value, reduce_fn) in output_merge_spec folds it, Replicate() takes the first"


def is_block_mask(value: Any) -> TypeIs[BlockMask]:
    """Return True for a BlockMask of flex attention, without importing its module, which is slow to import."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def mask_batch(mask: BlockMask) -> int:
    """Return the number of samples that a mask distinguishes; 1 if it is the same for all of them."""
    return mask.kv_indices.shape[0] if mask.kv_indices.dim() == 4 else 1


def rows_along(value: Any, dim: int) -> int:
    """Return the number of rows that a tensor or BlockMask has along the dim in which it is cut."""
    return mask_batch(value) if is_block_mask(value) else int(value.shape[dim])


# Cutting.


def cut_rows(value: Any, dim: int, sizes: Sequence[int]) -> list[Any]:
    """Cut a tensor or BlockMask into consecutive rows: views, through which gradients reach the whole tensor."""
    ranges = list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
    if is_block_mask(value):
        return [_cut_block_mask(value, start, size) for start, size in ranges]
    if is_distributed(value):
        return _cut_distributed(value, dim, ranges)
    # Not torch.split: autograd forbids in-place operations on views that one operation made several of.
    return [value.narrow(dim, start, size) for start, size in ranges]


def _cut_block_mask(mask: BlockMask, start: int, size: int) -> BlockMask:
    """Return the mask of some samples; `mask_mod` sees a sample under its number in the whole batch.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> lengths = torch.tensor([2, 3, 4])
    >>> mask = create_block_mask(lambda b, h, q, k: k < lengths[b], B=3, H=None, Q_LEN=4, KV_LEN=4, device="cpu")
    >>> last = _cut_block_mask(mask, 2, 1)
    >>> last.shape, [bool(last.mask_mod(torch.tensor(0), 0, 0, key)) for key in range(5)]
    ((1, 1, 4, 4), [True, True, True, True, False])
    """
    part = copy.copy(mask)
    batch = mask_batch(mask)
    # The tensors of a BlockMask depend on the release of torch; all have the batch in front, or a 1 there.
    for name, value in vars(mask).items():
        if isinstance(value, Tensor) and value.shape[0] == batch:
            setattr(part, name, value.narrow(0, start, size))
    part.mask_mod = _shifted(mask.mask_mod, start, mask.kv_indices.device)
    return part


def _shifted(mask_mod: _MaskMod, start: int, device: torch.device) -> _MaskMod:
    # A tensor, not a number: code compiled for one microbatch then serves the others too.
    offset = torch.tensor(start, dtype=torch.int32, device=device)

    def of_the_whole_batch(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_mod(sample + offset, head, query, key)

    return of_the_whole_batch


def _cut_distributed(tensor: DTensor, dim: int, ranges: _Ranges) -> list[Tensor]:
    """Cut a DTensor into views of global rows, placed as the tensor is.

    If `dim` is itself sharded, the rows of a microbatch are not on the ranks that must hold them: the tensor is
    gathered along that dim once, and each chunk sharded anew.
    """
    from torch.distributed.tensor import Replicate  # slow to import

    placements = tensor.placements
    whole = tensor
    if any(placement.is_shard(dim) for placement in placements):
        gathered = [Replicate() if placement.is_shard(dim) else placement for placement in placements]
        whole = tensor.redistribute(placements=gathered)
    return [_placed(whole.narrow(dim, start, size), placements) for start, size in ranges]


def _placed(tensor: Any, placements: Any) -> Tensor:
    placed: Tensor = tensor if tensor.placements == placements else tensor.redistribute(placements=placements)
    return placed


def check_can_be_cut(name: str, tensor: Tensor) -> None:
    """Raise on a tensor of a layout whose rows cannot be views."""
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


def check_holds_no_tensors(name: str, value: Any) -> None:
    """Raise on an object with tensors inside: every microbatch would get it with the samples of all."""
    if isinstance(value, type | nn.Module):
        return
    kind = type(value).__name__
    if hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0:
        raise InputError(f"{name} is of type {kind}, not a tensor: pass torch.as_tensor({name}), {_OR_REPLICATE}")
    inside, _ = flatten(getattr(value, "__dict__", None))
    if any(isinstance(leaf, Tensor) for leaf in inside):
        raise InputError(
            f"{name} is of type {kind}, which holds tensors that cannot be reached: pass its tensors "
            f"in a dict, a tuple or a dataclass, {_OR_REPLICATE}"
        )


# Merging.


def join(values: Sequence[Tensor], dim: int, name: str) -> Tensor:
    """Concatenate tensors along a dim, the only thing in which they may differ."""
    if not all(isinstance(value, Tensor) for value in values):
        kinds = ", ".join(type(value).__name__ for value in values)
        raise InputError(f"{name} is a tensor in some microbatches only ({kinds}), and cannot be merged")
    _check_placements(values, name)
    _check_misfits(values, dim, name)
    first = values[0]
    if len(values) == 1:
        return first
    joined = torch.cat(list(values), dim)
    return _placed(joined, first.placements) if is_distributed(first) else joined


def mean(values: Sequence[Tensor], weights: Sequence[float] | None, name: str) -> Tensor:
    """Average tensors without dims, each with its weight; integers must be the same in all microbatches."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        numbers = [value.item() for value in values]
        if len(set(numbers)) > 1:
            raise InputError(
                f"{name} is a tensor of {first.dtype} without dims, with {numbers} in the microbatches, and how to "
                f"merge it is not known: {_FOLD}"
            )
        return first
    _check_placements(values, name)
    weights = [1] * len(values) if weights is None else weights
    exact = torch.promote_types(first.dtype, torch.float32)
    # One without weight may be the mean of nothing, NaN.
    counted = [value.to(exact) * weight for value, weight in zip(values, weights, strict=True) if weight]
    total: Tensor = sum(counted)  # type: ignore[assignment]  # some microbatch has a weight
    return (total / sum(weights)).to(first.dtype)


def common_value(values: Sequence[Any], name: str) -> Any:
    """Return the value that all microbatches have."""
    first = values[0]
    for index, value in enumerate(values):
        if not _is_same(first, value):
            raise InputError(
                f"{name} is {first!r} in microbatch 0 and {value!r} in microbatch {index}, and how to merge it is "
                f"not known: {_FOLD}"
            )
    return first


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, PLAIN_TYPES):
        return False
    return bool(one == other) or (one != one and other != other)


def _check_placements(values: Sequence[Any], name: str) -> None:
    distributed = [is_distributed(value) for value in values]
    if not any(distributed):
        return
    if not all(distributed):
        plain = distributed.index(False)
        raise PlacementError(
            f"{name} is a mix of DTensors and plain tensors (plain in microbatch {plain}), which cannot be "
            "joined: return one or the other from every microbatch, with DTensor.from_local or .to_local()"
        )
    first = values[0]
    for index, value in enumerate(values):
        if (value.placements, value.device_mesh) != (first.placements, first.device_mesh):
            raise PlacementError(
                f"placement mismatch in {name}: {first.placements} on {first.device_mesh} in microbatch 0 and "
                f"{value.placements} on {value.device_mesh} in microbatch {index}: redistribute() them alike before "
                "they are returned"
            )


def _check_misfits(values: Sequence[Tensor], dim: int, name: str) -> None:
    first = values[0]
    if not -first.dim() <= dim < first.dim():
        raise NoSuchDimError(
            f"{name} cannot be joined along dim {dim}: its shape is {shape_text(first.shape)} in microbatch 0; {_FOLD}"
        )
    place, expected = dim % first.dim(), _apart_from(first, dim % first.dim())
    for index, value in enumerate(values):
        if _apart_from(value, place) != expected:
            raise MisfitError(
                f"{name} is {tensor_text(first)} on {first.device} in microbatch 0 and {tensor_text(value)} on "
                f"{value.device} in microbatch {index}: to be joined along dim {dim} they may differ in that dim only"
            )


def _apart_from(tensor: Tensor, dim: int) -> tuple[Any, ...]:
    return tuple(tensor.shape[:dim]), tuple(tensor.shape[dim + 1 :]), tensor.dim(), tensor.dtype, tensor.device
