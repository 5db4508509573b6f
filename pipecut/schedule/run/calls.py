"""A step's arguments as microbatches, with what the other ranks have to know of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import InputError
from ...pipe_ir.inputs import bind_inputs
from ...pipe_ir.structure import flatten, map_leaves
from ...pipe_ir.symbols import sizes_of
from ...pipe_ir.traced import TracedCall
from ...stage.batch_dims import batch_dims
from ...stage.microbatch import Microbatches, split_by_dims, split_by_specs


@dataclass(frozen=True)
class Calls:
    """The microbatches of one step on the rank of the first stage."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    samples: list[int]
    sizes: list[tuple[int, ...]]
    roots: list[Mapping[int, Tensor]]
    cut: bool = True  # whether anything was cut, or everything goes to all microbatches


def cut_traced(
    call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]
) -> Calls:
    """The microbatches of a traced model, cut along the dim that the trace has as the batch."""
    # A call that does not fit as a whole is refused in the words of the whole.
    dims = None if specs != (None, None) else batch_dims(call)
    if dims is None:
        made = split_by_specs(args, kwargs, chunks, *specs)
    else:
        made = split_by_dims(args, kwargs, chunks, dims, call.signature)
    roots: list[Mapping[int, Tensor]] = [
        bind_inputs(call, part, named) for part, named in zip(made.args, made.kwargs, strict=True)
    ]
    symbols = sorted(call.dims, key=str)
    sizes = []
    for root in roots:
        known = sizes_of(call.dims, root)
        sizes.append(tuple(known[str(symbol)] for symbol in symbols))
    return Calls(made.args, made.kwargs, _samples(made, chunks), sizes, roots)


def cut_by_hand(args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]) -> Calls:
    """The microbatches of modules that were cut by hand; all shapes together get one number."""
    made = split_by_specs(args, kwargs, chunks, *specs)
    sizes: list[tuple[int, ...]] = [
        (_number_of_shapes(part, named),) for part, named in zip(made.args, made.kwargs, strict=True)
    ]
    return Calls(made.args, made.kwargs, _samples(made, chunks), sizes, [], made.sizes is not None)


def _samples(made: Microbatches, chunks: int) -> list[int]:
    return [1] * chunks if made.sizes is None else list(made.sizes)


def _number_of_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    leaves, _ = flatten((args, dict(kwargs)))
    shapes = [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
    ]
    return zlib.crc32(repr(shapes).encode())


def cut_target(target: Any, samples: Sequence[int]) -> list[Any]:
    """The targets of the microbatches: rows that belong to their samples, also if there are several to a sample."""
    leaves, _ = flatten(target)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    total = sum(samples)
    wrong = [tensor for tensor in tensors if tensor.shape[0] % total]
    if wrong:
        raise InputError(
            f"the target has {wrong[0].shape[0]} rows, and the batch {total} samples: give that of the whole batch, "
            "with the same number of rows for each sample"
        )
    return [_rows(target, sum(samples[:nth]), size, total) for nth, size in enumerate(samples)]


def _rows(target: Any, start: int, size: int, total: int) -> Any:
    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        each = leaf.shape[0] // total
        return leaf.narrow(0, start * each, size * each)

    return map_leaves(rows, target)
