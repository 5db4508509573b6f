"""torch.distributed.pipelining.microbatch over pipecut's microbatches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import PipeError
from ..stage.microbatch import CustomReducer as _CustomReducer
from ..stage.microbatch import LossReducer as _LossReducer
from ..stage.microbatch import Replicate as _Replicate
from ..stage.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks, sum_reducer
from ..stage.microbatch import merge_chunks as _merge
from ..stage.microbatch import split_tensor as _split
from ..stage.microbatch.distributed_tensor import is_distributed

__all__ = [
    "TensorChunkSpec",
    "_CustomReducer",
    "_LossReducer",
    "_Replicate",
    "_split_tensor",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]

DEFAULT_CHUNK_DIM = 0
_debug_mask_minibatches = False
logger = logging.getLogger(__name__)


class MergeError(PipeError, AssertionError):
    """Results of microbatches do not fit together."""


class MergeSpecError(PipeError, ValueError):
    """A spec does not fit the results of the microbatches."""


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any) -> Any:
    """One result from those of the microbatches."""
    columns = zip(*(torch.utils._pytree.tree_leaves(chunk) for chunk in chunks), strict=False)
    for values in columns:
        placements = {value.placements if is_distributed(value) else None for value in values}
        if len(placements) > 1 and None in placements:
            raise MergeError("some chunks are DTensors and others are not: a mix cannot be merged")
        if len(placements) > 1:
            raise MergeError(f"placement mismatch of DTensor chunks: {', '.join(map(str, placements))}")
    if chunks:
        _check_lengths(chunks[0], chunk_spec, "chunk_spec")
    return _merge(chunks, chunk_spec)


def _check_lengths(chunk: Any, spec: Any, place: str) -> None:
    """Refuse a spec with fewer entries, or more, than the value it is for. One spec may stand for a whole value."""
    if isinstance(spec, tuple | list) and isinstance(chunk, tuple | list):
        if len(spec) != len(chunk):
            raise MergeSpecError(f"{place} has {len(spec)} entries, and a chunk has {len(chunk)} there: give one each")
        for index, (value, each) in enumerate(zip(chunk, spec, strict=True)):
            _check_lengths(value, each, f"{place}[{index}]")


def _split_tensor(tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int) -> tuple[torch.Tensor, ...]:
    return tuple(_split(tensor, spec, num_chunks))


def _split_block_mask(block_mask: Any, num_chunks: int) -> list[Any]:
    args, _ = split_args_kwargs_into_chunks((block_mask,), None, num_chunks)
    return [mask for (mask,) in args]


def _shard_dict_of_args(
    args_dict: Mapping[str, Any], args_chunk_spec: Mapping[str, Any], num_chunks: int
) -> list[dict[str, Any]]:
    _, kwargs = split_args_kwargs_into_chunks((), args_dict, num_chunks, None, args_chunk_spec)
    return kwargs
