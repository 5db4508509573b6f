"""The microbatches' results put together to that of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from ...errors import InputError
from ...pipe_ir.structure import Path, Structure, unflatten
from .call_leaves import open_value
from .chunk_spec import CustomReducer, Replicate, TensorChunkSpec
from .merge_leaf import Leaf, joined, mean, the_same
from .spec_match import match_specs

_SPEC, _KINDS = "output_merge_spec", (TensorChunkSpec, Replicate, CustomReducer)


class NothingToMergeError(InputError, IndexError):
    """No chunks. It is an IndexError too, as with the peer."""


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
        Leaf("output" + "".join(path), values, rule)
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


def _merged(leaf: Leaf, weights: Sequence[float] | None) -> Any:
    spec, values = leaf.rule.spec, leaf.values
    if isinstance(spec, Replicate):
        return values[0]
    if isinstance(spec, CustomReducer):
        return functools.reduce(spec.reduce_fn, values, spec.init_value)
    if not leaf.has_tensors:
        return the_same(leaf)
    if leaf.is_without_dims:
        return mean(leaf, weights)
    return joined(leaf, spec.split_dim if isinstance(spec, TensorChunkSpec) else 0)


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
    return structure.kind, structure.steps, tuple(map(_outline, structure.children))


def _words(structure: Structure) -> str:
    paths: list[Path] = list(structure.paths())
    return f"a {structure.kind} with {', '.join('output' + ''.join(path) for path in paths) or 'nothing'}"


def _is_known(counts: Sequence[int], sizes: Sequence[int], known: Sequence[Collection[int]]) -> bool:
    """Whether these are several rows to a sample, the same for all, and known: any number is a multiple of one."""
    each = counts[0] // sizes[0] if sizes[0] else 0
    multiple = [each * size for size in sizes] == list(counts)
    return multiple and len(known) == len(counts) and all(map(lambda some, one: one in some, known, counts))


def _check_samples(leaves: Sequence[Leaf], sizes: Sequence[int] | None, known: Sequence[Collection[int]]) -> None:
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
