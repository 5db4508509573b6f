"""One leaf of the microbatches' results, merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError
from ...pipe_ir.traced import PLAIN_TYPES
from .distributed_tensor import is_distributed, join_distributed
from .spec_match import Rule

_FOLD = "CustomReducer(init_value, reduce_fn) in output_merge_spec folds it, Replicate() takes the first"


class PlacementError(InputError, AssertionError):
    """DTensors that lie differently on their mesh, or DTensors and plain tensors, which cannot be joined."""


class MisfitError(InputError, RuntimeError):
    """Tensors that cannot be joined. It is a RuntimeError too, as with torch."""


class NoSuchDimError(InputError, IndexError):
    """Tensors without the dim that they should be joined along. It is an IndexError too, as with torch."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of the result: its name, its value in each microbatch, and how to merge it."""

    name: str
    values: tuple[Any, ...]
    rule: Rule

    @property
    def has_tensors(self) -> bool:
        return any(isinstance(value, torch.Tensor) for value in self.values)

    @property
    def is_without_dims(self) -> bool:
        """Whether it is a number in a tensor, and no spec was given for just it."""
        return not self.rule.exact and all(
            isinstance(value, torch.Tensor) and value.dim() == 0 for value in self.values
        )

    @property
    def is_joined_by_default(self) -> bool:
        tensors = all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in self.values)
        return self.rule.spec is None and tensors

    @property
    def rows(self) -> tuple[int, ...]:
        """The length of dim 0 in each microbatch."""
        return tuple(int(value.shape[0]) for value in self.values)


def the_same(leaf: Leaf) -> Any:
    """The value that all microbatches have."""
    first = leaf.values[0]
    for index, value in enumerate(leaf.values):
        if not _is_same(first, value):
            raise InputError(
                f"{leaf.name} is {first!r} in microbatch 0 and {value!r} in microbatch {index}, and how to merge it is "
                f"not known: {_FOLD}"
            )
    return first


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, PLAIN_TYPES):
        return False
    return bool(one == other) or (one != one and other != other)


def mean(leaf: Leaf, weights: Sequence[float] | None) -> torch.Tensor:
    """The mean of tensors without dims, weighted if there are weights."""
    first: torch.Tensor = leaf.values[0]
    if all(value is first for value in leaf.values):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        return _same_number(leaf)
    _refuse_mixed_placements(leaf)
    weights = [1] * len(leaf.values) if weights is None else weights
    exact = torch.promote_types(first.dtype, torch.float32)
    # One without weight may be the mean of nothing, NaN.
    counted = [(value, weight) for value, weight in zip(leaf.values, weights, strict=True) if weight]
    total: torch.Tensor = sum(value.to(exact) * weight for value, weight in counted)
    return (total / sum(weights)).to(first.dtype)


def _same_number(leaf: Leaf) -> torch.Tensor:
    first: torch.Tensor = leaf.values[0]
    numbers = [value.item() for value in leaf.values]
    if len(set(numbers)) > 1:
        raise InputError(
            f"{leaf.name} is a tensor of {first.dtype} without dims, with {numbers} in the microbatches, and how to "
            f"merge it is not known: {_FOLD}"
        )
    return first


def joined(leaf: Leaf, dim: int) -> torch.Tensor:
    """Tensors one after the other along a dim."""
    if not all(isinstance(value, torch.Tensor) for value in leaf.values):
        kinds = ", ".join(type(value).__name__ for value in leaf.values)
        raise InputError(f"{leaf.name} is a tensor in some microbatches only ({kinds}), and cannot be merged")
    _refuse_mixed_placements(leaf)
    _refuse_misfits(leaf, dim)
    first: torch.Tensor = leaf.values[0]
    if len(leaf.values) == 1:
        return first
    return join_distributed(leaf.values, dim) if is_distributed(first) else torch.cat(leaf.values, dim)


def _refuse_mixed_placements(leaf: Leaf) -> None:
    distributed = [is_distributed(value) for value in leaf.values]
    if not any(distributed):
        return
    if not all(distributed):
        plain = distributed.index(False)
        raise PlacementError(
            f"{leaf.name} is a mix of DTensors and plain tensors (plain in microbatch {plain}), which cannot be "
            "joined: return one or the other from every microbatch, with DTensor.from_local or .to_local()"
        )
    first = leaf.values[0]
    for index, value in enumerate(leaf.values):
        if (value.placements, value.device_mesh) != (first.placements, first.device_mesh):
            raise PlacementError(
                f"placement mismatch in {leaf.name}: {_placed(first)} in microbatch 0 and {_placed(value)} in "
                f"microbatch {index}: redistribute() them alike before they are returned"
            )


def _placed(tensor: Any) -> str:
    return f"{tensor.placements} on {tensor.device_mesh}"


def _refuse_misfits(leaf: Leaf, dim: int) -> None:
    """Chunks may differ along the dim in which they are joined, and in nothing else."""
    first = leaf.values[0]
    if not -first.dim() <= dim < first.dim():
        raise NoSuchDimError(
            f"{leaf.name} cannot be joined along dim {dim}: its shape is {list(first.shape)} in microbatch 0; {_FOLD}"
        )
    place = dim % first.dim()
    for index, value in enumerate(leaf.values):
        if _apart_from(value, place) != _apart_from(first, place):
            raise MisfitError(
                f"{leaf.name} is {_brief(first)} in microbatch 0 and {_brief(value)} in microbatch {index}: to be "
                f"joined along dim {dim} they may differ in that dim only"
            )


def _apart_from(tensor: torch.Tensor, dim: int) -> tuple[Any, ...]:
    return tuple(tensor.shape[:dim]), tuple(tensor.shape[dim + 1 :]), tensor.dim(), tensor.dtype, tensor.device


def _brief(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
