"""torch.distributed.pipelining.microbatch over pipecut's microbatches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import PipeError, SpecCountError, TooFewSamplesError
from ..stage import CustomReducer as _CustomReducer
from ..stage import LossReducer as _LossReducer
from ..stage import Replicate as _Replicate
from ..stage import TensorChunkSpec, is_distributed, sum_reducer
from ..stage import merge_chunks as _merge
from ..stage import split_args_kwargs_into_chunks as _split_call
from ..stage import split_tensor as _split

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


class MergeSpecError(PipeError, ValueError):
    """A spec does not fit the results of the microbatches."""


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any) -> Any:
    """Merge the results of the microbatches into one."""
    if chunks:
        _check_lengths(chunks[0], chunk_spec, "chunk_spec")
    return _merge(chunks, chunk_spec)


def _check_lengths(chunk: Any, spec: Any, place: str) -> None:
    """Raise on a spec with fewer or more entries than its value. One spec may stand for a whole value."""
    if isinstance(spec, tuple | list) and isinstance(chunk, tuple | list):
        if len(spec) != len(chunk):
            raise MergeSpecError(f"{place} has {len(spec)} entries, and a chunk has {len(chunk)} there: give one each")
        for index, (value, each) in enumerate(zip(chunk, spec, strict=True)):
            _check_lengths(value, each, f"{place}[{index}]")


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the arguments of each microbatch; with too few samples fewer microbatches, where a step raises.

    >>> split_args_kwargs_into_chunks((torch.arange(2),), None, 4)
    ([(tensor([0]),), (tensor([1]),)], [{}, {}])
    """
    if kwargs and isinstance(kwargs_chunk_spec, Mapping) and len(kwargs_chunk_spec) != len(kwargs):
        raise SpecCountError(
            f"kwargs_chunk_spec is for {_names(kwargs_chunk_spec)}, and the keyword arguments are {_names(kwargs)}: "
            "give one for each, None for one that is cut in the default way, or leave it out"
        )
    try:
        return _split_call(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec)
    except TooFewSamplesError as error:
        if not error.samples:
            raise
        return _split_call(args, kwargs, error.samples, args_chunk_spec, kwargs_chunk_spec)


def _names(entries: Mapping[str, Any]) -> str:
    return ", ".join(map(str, entries)) or "none"


def _split_tensor(tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int) -> Sequence[torch.Tensor]:
    pieces = _split(tensor, spec, num_chunks)
    return pieces if is_distributed(tensor) else tuple(pieces)


def _split_block_mask(block_mask: Any, num_chunks: int) -> list[Any]:
    args, _ = _split_call((block_mask,), None, num_chunks)
    return [mask for (mask,) in args]


def _shard_dict_of_args(
    args_dict: Mapping[str, Any], args_chunk_spec: Mapping[str, Any], num_chunks: int
) -> list[dict[str, Any]]:
    _, kwargs = split_args_kwargs_into_chunks((), args_dict, num_chunks, None, args_chunk_spec)
    return kwargs
