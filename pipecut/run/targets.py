"""Cut the target of a batch into those of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..pipe_ir import unflatten
from ..stage import Rule, cut_rows, match_specs, open_value
from ..text import shape_text

_SPEC = "target_chunk_spec"
_REMEDY = (
    "make the schedule with target_chunk_spec=TensorChunkSpec(dim); Replicate() is for a target that goes to every "
    "microbatch whole"
)


def cut_target(
    target: Any, samples: Sequence[int], spec: Any = None, *, samples_first: bool = True, in_order: bool = True
) -> list[Any]:
    """Cut a target into the rows that belong to the samples of each microbatch, also if there are several to a sample.

    The spec is TensorChunkSpec(dim), Replicate(), another ChunkSpec, or a nested value of these; by default the samples
    are in dim 0. That raises an error if not all inputs have their samples there (`samples_first`), unless the target
    is one value for each sample; and if several rows to a sample are possible and parts of the target differ in their
    number. `in_order` says that the microbatches hold consecutive samples, as those of the target must then.

    >>> import torch
    >>> from pipecut import TensorChunkSpec
    >>> [part.tolist() for part in cut_target(torch.arange(6).reshape(2, 3), [2, 1], TensorChunkSpec(1))]
    [[[0, 1], [3, 4]], [[2], [5]]]
    """
    is_plain = type(target) is Tensor and not target.is_nested and target.dim() > 0
    if is_plain and spec is None and samples_first and in_order and target.shape[0] == sum(samples):
        return cut_rows(target, 0, samples)
    leaves, structure = open_value(target)
    rules = match_specs(spec, structure, _SPEC, "cut")
    names = ["target" + "".join(path) for path in structure.paths()]
    parts = [
        _leaf(name, value, rule, sum(samples), samples_first or not in_order)
        for name, value, rule in zip(names, leaves, rules, strict=True)
    ]
    counted = [part for part in parts if part.rows is not None]
    _check_order(counted, in_order)
    _check_rows(counted, samples)
    columns = [part.cut(samples) for part in parts]
    return [unflatten(structure, [column[nth] for column in columns]) for nth in range(len(samples))]


@dataclass(frozen=True, eq=False)
class _Leaf:
    """One leaf of a target, and the spec that cuts it."""

    name: str
    value: Any
    rule: Rule
    rows: int | None  # None if it goes to every microbatch whole
    dim: int | None = None  # in which it has its rows, if it is cut along a dim

    @property
    def by_default(self) -> bool:
        return not self.rule.given

    def has_elsewhere(self, samples: int) -> bool:
        """Return True if another dim than the first has as many entries as there are samples."""
        return samples in self.value.shape[1:]

    def cut(self, samples: Sequence[int]) -> Sequence[Any]:
        """Return the parts of the microbatches."""
        if self.by_default and self.rows is None:
            return [self.value] * len(samples)
        each = 1 if self.rows is None else self.rows // sum(samples)
        return self.rule.spec.cut(self.value, [each * size for size in samples], self.name)


def _leaf(name: str, value: Any, rule: Rule, total: int, samples_first: bool) -> _Leaf:
    if rule.given:
        return _Leaf(name, value, rule, rule.spec.samples(value, name), rule.spec.cut_dim(value, name))
    if not isinstance(value, Tensor) or value.dim() == 0:
        return _Leaf(name, value, rule, None)
    if not samples_first and tuple(value.shape) != (total,):
        raise InputError(
            f"{name} has the shape {shape_text(value.shape)}, and it is not known in which dim its {total} samples "
            f"are, for inputs have theirs in another dim than 0: {_REMEDY}"
        )
    return _Leaf(name, value, rule, value.shape[0], 0)


def _check_order(parts: Sequence[_Leaf], in_order: bool) -> None:
    """Raise if inputs and target would be cut into different samples."""
    for part in parts:
        if part.rule.spec.keeps_order != in_order:
            inputs, target = ("", "not ") if in_order else ("not ", "")
            raise InputError(
                f"the inputs are {inputs}cut into consecutive samples, and {part.name} is {target}cut so by "
                f"{part.rule.spec!r}: make the schedule with a target_chunk_spec= that cuts it like the inputs"
            )


def _check_rows(parts: Sequence[_Leaf], samples: Sequence[int]) -> None:
    """Raise unless every tensor has a row per sample, or several without anything that speaks against it."""
    total = sum(samples)
    for part in parts:
        if part.rows is not None and part.rows % total:
            where = "rows" if part.dim in (None, 0) else f"entries along dim {part.dim}"
            raise InputError(
                f"the {part.name} has {part.rows} {where}, and the batch {total} samples: give that of the whole "
                "batch, with the same number of rows for each sample; if its samples are in another dim, or it has "
                f"none, {_REMEDY}"
            )
    # What has a row for each sample is not in doubt.
    guessed = [part for part in parts if part.by_default and part.rows != total]
    if len(samples) > 1 and guessed:
        _check_rows_agree(guessed[0], parts, total)
        if all(part.by_default and part.has_elsewhere(total) for part in parts):
            _raise_samples_elsewhere(guessed[0], total)


def _check_rows_agree(part: _Leaf, parts: Sequence[_Leaf], total: int) -> None:
    """Raise on several rows per sample beside another number: it may be a table that belongs to all samples."""
    other = next((one for one in parts if one.rows != part.rows), None)
    if other is None or part.rows is None:
        return
    each = part.rows // total
    raise InputError(
        f"{part.name} has {part.rows} rows, {other.name} has {other.rows}, and the batch {total} samples: it is not "
        f"known whether {part.name} has {each} rows for each sample, or belongs to all of them. "
        f"Make the schedule with target_chunk_spec=, in which {part.name} has TensorChunkSpec(0) if it is to be cut, "
        "and Replicate() if it goes to every microbatch whole"
    )


def _raise_samples_elsewhere(part: _Leaf, total: int) -> None:
    """Raise on several rows per sample if the samples may be in another dim, as where a model returns them there."""
    dim = list(part.value.shape).index(total, 1)
    raise InputError(
        f"{part.name} has the shape {shape_text(part.value.shape)}, and the batch {total} samples: it is not known "
        f"whether they are in dim 0, with {len(part.value) // total} rows each, or in dim {dim}. Make the schedule "
        f"with target_chunk_spec=TensorChunkSpec(0), or TensorChunkSpec({dim})"
    )
