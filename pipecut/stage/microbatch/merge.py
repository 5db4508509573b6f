"""The microbatches' results put together to that of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError, MisfitError, NoSuchDimError, NothingToMergeError, PlacementError
from ...pipe_ir import PLAIN_TYPES, Path, Structure, unflatten
from ...text import tensor_text
from .calls import open_value
from .spec import CustomReducer, Replicate, Rule, TensorChunkSpec, match_specs
from .tensors import is_distributed, join_distributed

# MERGED: One leaf of the microbatches' results, merged.


_FOLD = "CustomReducer(init_value, reduce_fn) in output_merge_spec folds it, Replicate() takes the first"


@dataclass(frozen=True)
class _Leaf:
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


def _the_same(leaf: _Leaf) -> Any:
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


def _mean(leaf: _Leaf, weights: Sequence[float] | None) -> torch.Tensor:
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


def _same_number(leaf: _Leaf) -> torch.Tensor:
    first: torch.Tensor = leaf.values[0]
    numbers = [value.item() for value in leaf.values]
    if len(set(numbers)) > 1:
        raise InputError(
            f"{leaf.name} is a tensor of {first.dtype} without dims, with {numbers} in the microbatches, and how to "
            f"merge it is not known: {_FOLD}"
        )
    return first


def _joined(leaf: _Leaf, dim: int) -> torch.Tensor:
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


def _refuse_mixed_placements(leaf: _Leaf) -> None:
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


def _refuse_misfits(leaf: _Leaf, dim: int) -> None:
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
                f"{leaf.name} is {tensor_text(first)} on {first.device} in microbatch 0 and {tensor_text(value)} on "
                f"{value.device} in microbatch {index}: to be "
                f"joined along dim {dim} they may differ in that dim only"
            )


def _apart_from(tensor: torch.Tensor, dim: int) -> tuple[Any, ...]:
    return tuple(tensor.shape[:dim]), tuple(tensor.shape[dim + 1 :]), tensor.dim(), tensor.dtype, tensor.device


_SPEC, _KINDS = "output_merge_spec", (TensorChunkSpec, Replicate, CustomReducer)


def merge_chunks(
    chunks: Sequence[Any],
    chunk_spec: Any,
    sizes: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    rows: Sequence[Collection[int]] = (),
) -> Any:
    """One result from those of the microbatches, in the same structure. `sizes` are their numbers of samples.

    The spec is None, TensorChunkSpec(dim), Replicate() (the first microbatch's), a CustomReducer, or a nested value of
    these. A tuple or list of one spec makes one of a result that is not nested. By default tensors are joined along
    dim 0, which must hold the samples, or several rows for each of them, if their number is among the `rows` that are
    known for that microbatch; a tensor without dims is averaged, each microbatch with the weight of its size, or that
    in `weights`; and any other value must be the same in all microbatches.

    >>> from torch import tensor
    >>> merge_chunks([(tensor([1, 2]), tensor(3.0), "sum"), (tensor([3]), tensor(0.0), "sum")], None, sizes=(2, 1))
    (tensor([1, 2, 3]), tensor(2.), 'sum')
    """
    opened = [open_value(chunk, holders=True) for chunk in chunks]
    _check(opened, sizes)
    structure = opened[0][1]
    if _is_around(chunk_spec, structure):
        inside = merge_chunks(chunks, chunk_spec[0], sizes, weights, rows)
        return [inside] if isinstance(chunk_spec, list) else (inside,)
    rules = match_specs(chunk_spec, structure, _SPEC, _KINDS)
    columns = zip(*(values for values, _ in opened), strict=True)
    leaves = [
        _Leaf("output" + "".join(path), values, rule)
        for path, values, rule in zip(structure.paths(), columns, rules, strict=True)
    ]
    _check_samples(leaves, sizes, rows)
    return unflatten(structure, [_merged(leaf, weights or sizes) for leaf in leaves])


def check_merge_spec(result: Any, chunk_spec: Any) -> None:
    """Refuse a spec that does not fit the structure of the results."""
    _, structure = open_value(result, holders=True)
    while _is_around(chunk_spec, structure):
        chunk_spec = chunk_spec[0]
    match_specs(chunk_spec, structure, _SPEC, _KINDS)


def _is_around(chunk_spec: Any, structure: Structure) -> bool:
    """Whether a spec asks for a tuple or list around a single value."""
    return structure.rebuild is None and isinstance(chunk_spec, tuple | list) and len(chunk_spec) == 1


def _merged(leaf: _Leaf, weights: Sequence[float] | None) -> Any:
    spec, values = leaf.rule.spec, leaf.values
    if isinstance(spec, Replicate):
        return values[0]
    if isinstance(spec, CustomReducer):
        return functools.reduce(spec.reduce_fn, values, spec.init_value)
    if not leaf.has_tensors:
        return _the_same(leaf)
    if leaf.is_without_dims:
        return _mean(leaf, weights)
    return _joined(leaf, spec.split_dim if isinstance(spec, TensorChunkSpec) else 0)


def _check(opened: Sequence[tuple[list[Any], Structure]], sizes: Sequence[int] | None) -> None:
    if not opened:
        raise NothingToMergeError("there is nothing to merge: the list of chunks is empty")
    if sizes is not None and len(sizes) != len(opened):
        raise InputError(f"sizes has {len(sizes)} entries for {len(opened)} chunks")
    expected = _outline(opened[0][1])
    for index, (_, structure) in enumerate(opened):
        if _outline(structure) != expected:
            raise InputError(
                f"the outputs of the microbatches differ in structure and cannot be merged: that of microbatch 0 is "
                f"{_words(opened[0][1])}, and that of microbatch {index} is {_words(structure)}"
            )


def _outline(structure: Structure) -> tuple[Any, ...]:
    return structure.kind, structure.keys, tuple(map(_outline, structure.children))


def _words(structure: Structure) -> str:
    paths: list[Path] = list(structure.paths())
    return f"a {structure.kind} with {', '.join('output' + ''.join(path) for path in paths) or 'nothing'}"


def _is_known(counts: Sequence[int], sizes: Sequence[int], known: Sequence[Collection[int]]) -> bool:
    """Whether these are several rows to a sample, the same for all, and known: any number is a multiple of one."""
    each = counts[0] // sizes[0] if sizes[0] else 0
    multiple = [each * size for size in sizes] == list(counts)
    return multiple and len(known) == len(counts) and all(map(lambda some, one: one in some, known, counts))


def _check_samples(leaves: Sequence[_Leaf], sizes: Sequence[int] | None, known: Sequence[Collection[int]]) -> None:
    """Dim 0 is the samples' where no spec says otherwise; it has one row, or several, for each of them."""
    rows = {leaf.name: leaf.rows for leaf in leaves if leaf.is_joined_by_default}
    expected = next(iter(rows.values()), ()) if sizes is None else tuple(sizes)
    if all(counts == expected or _is_known(counts, expected, known) for counts in rows.values()):
        return
    lines = ["the outputs of the microbatches cannot be joined along dim 0, which does not hold the samples in all:"]
    if sizes is not None:
        lines.append(f"  the microbatches have {list(sizes)} samples")
    lines += [f"  {name} has {list(counts)} along dim 0" for name, counts in rows.items()]
    lines.append(
        "say in output_merge_spec how to merge such an output: TensorChunkSpec(dim) joins it along a dim, Replicate() "
        "takes that of the first microbatch, CustomReducer(init_value, reduce_fn) folds it"
    )
    raise InputError("\n".join(lines))
