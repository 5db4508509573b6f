"""The target of a batch cut into those of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...errors import InputError
from ...pipe_ir.structure import unflatten
from ...stage.microbatch import Replicate, TensorChunkSpec
from ...stage.microbatch.call_leaves import open_value
from ...stage.microbatch.spec_match import Rule, match_specs
from ...stage.microbatch.tensor_cut import cut, cut_dim

_SPEC = "target_chunk_spec"


def cut_target(target: Any, samples: Sequence[int], spec: Any = None, *, samples_first: bool = True) -> list[Any]:
    """The targets of the microbatches: rows that belong to their samples, also if there are several to a sample.

    The spec is TensorChunkSpec(dim), Replicate(), or a nested value of these; by default the samples are in dim 0. That
    is refused if not all inputs have their samples there, unless the target is one value for each sample.

    >>> import torch
    >>> [part.tolist() for part in cut_target(torch.arange(6).reshape(2, 3), [2, 1], TensorChunkSpec(1))]
    [[[0, 1], [3, 4]], [[2], [5]]]
    """
    leaves, structure = open_value(target)
    rules = match_specs(spec, structure, _SPEC, (TensorChunkSpec, Replicate))
    names = ["target" + "".join(path) for path in structure.paths()]
    columns = []
    for name, leaf, rule in zip(names, leaves, rules, strict=True):
        dim = _dim(name, leaf, rule, sum(samples), samples_first)
        columns.append([leaf] * len(samples) if dim is None else _parts(name, leaf, dim, samples))
    return [unflatten(structure, [column[nth] for column in columns]) for nth in range(len(samples))]


def _dim(name: str, leaf: Any, rule: Rule, total: int, samples_first: bool) -> int | None:
    """The dim in which a leaf has its samples; None if it goes to every microbatch whole."""
    if rule.spec is not None:
        return cut_dim(name, leaf, rule)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    if not samples_first and tuple(leaf.shape) != (total,):
        raise InputError(
            f"{name} has the shape {list(leaf.shape)}, and it is not known in which dim its {total} samples are, for "
            "inputs have theirs in another dim than 0: make the schedule with target_chunk_spec=TensorChunkSpec(dim); "
            "Replicate() is for a target that goes to every microbatch whole"
        )
    return 0


def _parts(name: str, leaf: Any, dim: int, samples: Sequence[int]) -> list[Any]:
    total = sum(samples)
    if not isinstance(leaf, Tensor):
        return cut(leaf, dim, samples)
    if leaf.shape[dim] % total:
        raise InputError(
            f"the {name} has {leaf.shape[dim]} {'rows' if dim == 0 else f'entries along dim {dim}'}, and the batch "
            f"{total} samples: give that of the whole batch, with the same number of rows for each sample; if its "
            "samples are in another dim, make the schedule with target_chunk_spec=TensorChunkSpec(dim)"
        )
    each = leaf.shape[dim] // total
    return cut(leaf, dim, [each * size for size in samples])
