"""How a value is cut into microbatches and put together again, as the user says it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...pipe_ir.structure import Atom, map_leaves


@dataclass(frozen=True, repr=False)
class TensorChunkSpec(Atom):
    """A tensor whose samples lie along `split_dim`. Given for a nested argument, it holds for all tensors inside.

    >>> TensorChunkSpec(1)
    TensorChunkSpec(1)
    >>> TensorChunkSpec.from_tuple((0, 1)), TensorChunkSpec.from_dict({"y": 0})
    ((TensorChunkSpec(0), TensorChunkSpec(1)), {'y': TensorChunkSpec(0)})
    """

    split_dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.split_dim, int) or isinstance(self.split_dim, bool):
            raise InputError(
                f"TensorChunkSpec takes the number of a dim, such as TensorChunkSpec(0); got {self.split_dim!r}"
            )

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> tuple[Any, ...]:
        """Specs for positional arguments, from the dims; a None stays, for the default."""
        specs: tuple[Any, ...] = map_leaves(_spec_of_dim, chunk_dims)
        return specs

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """Specs for keyword arguments, from the dims; a None stays, for the default."""
        specs: dict[str, Any] = map_leaves(_spec_of_dim, chunk_dims)
        return specs


def _spec_of_dim(dim: int | None) -> TensorChunkSpec | None:
    return None if dim is None else TensorChunkSpec(dim)


@dataclass(frozen=True)
class Replicate(Atom):
    """A value that every microbatch gets as it is; of a result, the first microbatch's. The class itself will do too.

    >>> Replicate()
    Replicate()
    """


@dataclass(frozen=True, eq=False)
class CustomReducer(Atom):
    """A result that is folded: `reduce_fn(so_far, value)` over the microbatches in order, from `init_value`.

    >>> from pipecut.stage.microbatch import merge_chunks
    >>> merge_chunks([{"tokens": 3}, {"tokens": 4}], {"tokens": CustomReducer(0, operator.add)})
    {'tokens': 7}
    """

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


@dataclass(frozen=True, eq=False)
class LossReducer(CustomReducer):
    """A CustomReducer for a loss."""


sum_reducer = LossReducer(0, operator.add)

# The names that torch.distributed.pipelining has for these.
_Replicate = Replicate
_CustomReducer = CustomReducer
_LossReducer = LossReducer
