"""The target of a batch cut into those of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..pipe_ir import unflatten
from ..stage import Replicate, Rule, TensorChunkSpec, cut, cut_dim, match_specs, open_value

_SPEC = "target_chunk_spec"
_REMEDY = (
    "make the schedule with target_chunk_spec=TensorChunkSpec(dim); Replicate() is for a target that goes to every "
    "microbatch whole"
)


def cut_target(target: Any, samples: Sequence[int], spec: Any = None, *, samples_first: bool = True) -> list[Any]:
    """The targets of the microbatches: rows that belong to their samples, also if there are several to a sample.

    The spec is TensorChunkSpec(dim), Replicate(), or a nested value of these; by default the samples are in dim 0. That
    is refused if not all inputs have their samples there, unless the target is one value for each sample; and several
    rows to a sample are refused if parts of the target differ in their number.

    >>> import torch
    >>> [part.tolist() for part in cut_target(torch.arange(6).reshape(2, 3), [2, 1], TensorChunkSpec(1))]
    [[[0, 1], [3, 4]], [[2], [5]]]
    """
    leaves, structure = open_value(target)
    rules = match_specs(spec, structure, _SPEC, (TensorChunkSpec, Replicate))
    names = ["target" + "".join(path) for path in structure.paths()]
    parts = [
        _Leaf(name, leaf, rule.spec is None, _dim(name, leaf, rule, sum(samples), samples_first))
        for name, leaf, rule in zip(names, leaves, rules, strict=True)
    ]
    _refuse_doubtful([part for part in parts if part.rows is not None], samples)
    columns = [part.cut(samples) for part in parts]
    return [unflatten(structure, [column[nth] for column in columns]) for nth in range(len(samples))]


@dataclass(frozen=True)
class _Leaf:
    """One leaf of a target, and how it is cut."""

    name: str
    value: Any
    by_default: bool  # no spec was given for it
    dim: int | None  # in which it has its samples; None if it goes to every microbatch whole

    @property
    def rows(self) -> int | None:
        """How many rows there are to be cut, of a tensor."""
        is_cut = self.dim is not None and isinstance(self.value, Tensor)
        return self.value.shape[self.dim] if is_cut else None

    def has_elsewhere(self, samples: int) -> bool:
        """Whether another dim than the first has as many entries as there are samples."""
        return samples in self.value.shape[1:]

    def cut(self, samples: Sequence[int]) -> list[Any]:
        """The parts of the microbatches."""
        if self.dim is None:
            return [self.value] * len(samples)
        each = 1 if self.rows is None else self.rows // sum(samples)
        return cut(self.value, self.dim, [each * size for size in samples])


def _dim(name: str, leaf: Any, rule: Rule, total: int, samples_first: bool) -> int | None:
    """The dim in which a leaf has its samples; None if it goes to every microbatch whole."""
    if rule.spec is not None:
        return cut_dim(name, leaf, rule)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    if not samples_first and tuple(leaf.shape) != (total,):
        raise InputError(
            f"{name} has the shape {list(leaf.shape)}, and it is not known in which dim its {total} samples are, for "
            f"inputs have theirs in another dim than 0: {_REMEDY}"
        )
    return 0


def _refuse_doubtful(parts: Sequence[_Leaf], samples: Sequence[int]) -> None:
    """Several rows to a sample are taken for what they are only if nothing speaks against it."""
    total = sum(samples)
    for part in parts:
        if part.rows is not None and part.rows % total:
            where = "rows" if part.dim == 0 else f"entries along dim {part.dim}"
            raise InputError(
                f"the {part.name} has {part.rows} {where}, and the batch {total} samples: give that of the whole "
                "batch, with the same number of rows for each sample; if its samples are in another dim, or it has "
                f"none, {_REMEDY}"
            )
    # What has a row for each sample is not in doubt.
    guessed = [part for part in parts if part.by_default and part.rows != total]
    if len(samples) > 1 and guessed:
        _refuse_one_beside_others(guessed[0], parts, total)
        if all(part.by_default and part.has_elsewhere(total) for part in parts):
            _refuse_samples_elsewhere(guessed[0], total)


def _refuse_one_beside_others(part: _Leaf, parts: Sequence[_Leaf], total: int) -> None:
    """A table that belongs to all samples may happen to have a multiple of their number of rows."""
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


def _refuse_samples_elsewhere(part: _Leaf, total: int) -> None:
    """A model may return its samples in another dim than it takes them in, and then they are there in the target."""
    dim = list(part.value.shape).index(total, 1)
    raise InputError(
        f"{part.name} has the shape {list(part.value.shape)}, and the batch {total} samples: it is not known whether "
        f"they are in dim 0, with {len(part.value) // total} rows each, or in dim {dim}. Make the schedule with "
        f"target_chunk_spec=TensorChunkSpec(0), or TensorChunkSpec({dim})"
    )
