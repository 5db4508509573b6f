"""Merge the results of the microbatches into that of the whole batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import InputError, NothingToMergeError
from ...pipe_ir import Path, Structure, Unsent, unflatten
from .calls import open_value
from .spec import Rule, match_specs

_SPEC = "output_merge_spec"
_REMEDY = (
    "say in output_merge_spec how to merge such an output: TensorChunkSpec(dim) joins it along a dim, Replicate() "
    "takes that of the first microbatch, CustomReducer(init_value, reduce_fn) folds it"
)


@dataclass(frozen=True)
class _Leaf:
    """One leaf of the result: its name, its value in each microbatch, and the rule to merge it."""

    name: str
    values: tuple[Any, ...]
    rule: Rule

    @property
    def is_joined_by_default(self) -> bool:
        tensors = all(isinstance(value, Tensor) and value.dim() > 0 for value in self.values)
        return not self.rule.given and tensors

    @property
    def rows(self) -> tuple[int, ...]:
        """The length of dim 0 in each microbatch."""
        return tuple(int(value.shape[0]) for value in self.values)

    def merged(self, weights: Sequence[float] | None) -> Any:
        """Return the value of the whole batch; an output that was not sent is missing there too, whatever its rule."""
        first = self.values[0]
        return first if type(first) is Unsent else self.rule.spec.merge(self.values, weights, self.name)


def merge_chunks(
    chunks: Sequence[Any],
    chunk_spec: Any,
    sizes: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    rows: Sequence[Collection[int]] = (),
    in_order: bool = True,
) -> Any:
    """Merge the results of the microbatches, which have one structure. `sizes` are their numbers of samples.

    The spec is None, TensorChunkSpec(dim), Replicate() (the first microbatch's), a CustomReducer, another ChunkSpec, or
    a nested value of these. A tuple or list of one spec makes one of a result that is not nested. By default tensors
    are joined along dim 0, which must hold the samples, or several rows for each of them, if their number is among the
    `rows` that are known for that microbatch; a tensor without dims is averaged, each microbatch with the weight of its
    size, or that in `weights`; and any other value must be the same in all microbatches. Nothing is joined by default
    if the microbatches do not hold consecutive samples (`in_order=False`).

    >>> from torch import tensor
    >>> merge_chunks([(tensor([1, 2]), tensor(3.0), "sum"), (tensor([3]), tensor(0.0), "sum")], None, sizes=(2, 1))
    (tensor([1, 2, 3]), tensor(2.), 'sum')
    """
    opened = [open_value(chunk, holders=True) for chunk in chunks]
    _check(opened, sizes)
    structure = opened[0][1]
    if _is_around(chunk_spec, structure):
        inside = merge_chunks(chunks, chunk_spec[0], sizes, weights, rows, in_order)
        return [inside] if isinstance(chunk_spec, list) else (inside,)
    rules = match_specs(chunk_spec, structure, _SPEC, "merge")
    columns = zip(*(values for values, _ in opened), strict=True)
    leaves = [
        _Leaf("output" + "".join(path), values, rule)
        for path, values, rule in zip(structure.paths(), columns, rules, strict=True)
    ]
    if not in_order:
        _check_order(leaves)
    _check_samples(leaves, sizes, rows)
    weights = weights or sizes
    return unflatten(structure, [leaf.merged(weights) for leaf in leaves])


def check_merge_spec(result: Any, chunk_spec: Any) -> None:
    """Raise on a spec that does not fit the structure of the results."""
    _, structure = open_value(result, holders=True)
    while _is_around(chunk_spec, structure):
        chunk_spec = chunk_spec[0]
    match_specs(chunk_spec, structure, _SPEC, "merge")


def _is_around(chunk_spec: Any, structure: Structure) -> bool:
    """Return True if a spec asks for a tuple or list around a single value."""
    return structure.rebuild is None and isinstance(chunk_spec, tuple | list) and len(chunk_spec) == 1


def _check(opened: Sequence[tuple[list[Any], Structure]], sizes: Sequence[int] | None) -> None:
    if not opened:
        raise NothingToMergeError("there is nothing to merge: the list of chunks is empty")
    if sizes is not None and len(sizes) != len(opened):
        raise InputError(f"sizes has {len(sizes)} entries for {len(opened)} chunks")
    first = opened[0][1]
    for index, (_, structure) in enumerate(opened):
        if structure is not first and _outline(structure) != _outline(first):
            raise InputError(
                f"the outputs of the microbatches differ in structure and cannot be merged: that of microbatch 0 is "
                f"{_words(first)}, and that of microbatch {index} is {_words(structure)}"
            )


def _outline(structure: Structure) -> tuple[Any, ...]:
    return structure.kind, structure.keys, tuple(map(_outline, structure.children))


def _words(structure: Structure) -> str:
    paths: list[Path] = list(structure.paths())
    return f"a {structure.kind} with {', '.join('output' + ''.join(path) for path in paths) or 'nothing'}"


def _check_order(leaves: Sequence[_Leaf]) -> None:
    joined = [leaf.name for leaf in leaves if leaf.is_joined_by_default]
    if joined:
        raise InputError(
            f"the inputs were not cut into consecutive samples, and how to bring {', '.join(joined)} back into the "
            f"order of the batch is not known: {_REMEDY}; a ChunkSpec of your own may do it in its merge()"
        )


def _is_known(counts: Sequence[int], sizes: Sequence[int], known: Sequence[Collection[int]]) -> bool:
    """Return True if each sample has the same number of rows, and the totals are known: many are multiples of one."""
    each = counts[0] // sizes[0] if sizes[0] else 0
    multiple = [each * size for size in sizes] == list(counts)
    return multiple and len(known) == len(counts) and all(map(lambda some, one: one in some, known, counts))


def _check_samples(leaves: Sequence[_Leaf], sizes: Sequence[int] | None, known: Sequence[Collection[int]]) -> None:
    """Raise if dim 0 of a leaf without a spec does not hold one row, or several, for each sample."""
    rows = {leaf.name: leaf.rows for leaf in leaves if leaf.is_joined_by_default}
    expected = next(iter(rows.values()), ()) if sizes is None else tuple(sizes)
    if all(counts == expected or _is_known(counts, expected, known) for counts in rows.values()):
        return
    lines = ["the outputs of the microbatches cannot be joined along dim 0, which does not hold the samples in all:"]
    if sizes is not None:
        lines.append(f"  the microbatches have {list(sizes)} samples")
    lines += [f"  {name} has {list(counts)} along dim 0" for name, counts in rows.items()]
    lines.append(_REMEDY)
    raise InputError("\n".join(lines))
