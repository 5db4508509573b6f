"""A step's arguments as microbatches, with what the other ranks have to know of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...pipe_ir.ambient import ambient_autocast
from ...pipe_ir.structure import flatten
from ...pipe_ir.symbols import sizes_of
from ...pipe_ir.traced import TracedCall
from ...stage.microbatch import Microbatches, split_by_dims, split_by_specs
from ...stage.microbatch.batch_dims import batch_dims
from .fitting import bind_microbatches
from .transport import Meta


@dataclass(frozen=True)
class Calls:
    """The microbatches of one step on the rank of the first stage."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    samples: list[int]
    sizes: list[tuple[int, ...]]
    roots: list[Mapping[int, Tensor]]
    cut: bool = True  # whether anything was cut, or everything goes to all microbatches
    dims: tuple[int | None, ...] = ()  # along which the leaves were cut, those of `args` first

    @property
    def samples_first(self) -> bool:
        """Whether all that was cut has its samples in dim 0."""
        return all(dim in (None, 0) for dim in self.dims)


def cut_traced(
    call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]
) -> Calls:
    """The microbatches of a traced model, cut along the dim that the trace has as the batch."""
    dims = None if specs != (None, None) else batch_dims(call)
    if dims is None:
        made = split_by_specs(args, kwargs, chunks, *specs)
    else:
        made = split_by_dims(args, kwargs, chunks, dims, call.signature)
    roots = bind_microbatches(call, made, args, kwargs)
    symbols = sorted(call.dims, key=str)
    sizes = []
    for root in roots:
        known = sizes_of(call.dims, root)
        sizes.append(tuple(known[str(symbol)] for symbol in symbols))
    return Calls(made.args, made.kwargs, _samples(made, chunks), sizes, roots, made.sizes is not None, made.dims)


def cut_by_hand(args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]) -> Calls:
    """The microbatches of modules that were cut by hand; all shapes together get one number."""
    made = split_by_specs(args, kwargs, chunks, *specs)
    sizes: list[tuple[int, ...]] = [
        (_number_of_shapes(part, named),) for part, named in zip(made.args, made.kwargs, strict=True)
    ]
    return Calls(made.args, made.kwargs, _samples(made, chunks), sizes, [], made.sizes is not None, made.dims)


def _samples(made: Microbatches, chunks: int) -> list[int]:
    return [1] * chunks if made.sizes is None else list(made.sizes)


def _number_of_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    leaves, _ = flatten((args, dict(kwargs)))
    shapes = [str(Meta.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    # Under autocast the stages give other dtypes.
    return zlib.crc32(repr((shapes, ambient_autocast())).encode())
