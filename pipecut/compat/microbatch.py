"""torch.distributed.pipelining.microbatch over pipecut's microbatches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, PipeError, SpecCountError, TooFewSamplesError
from ..pipe_ir import Structure, unflatten
from ..run import Given, InputCutter, StepState
from ..stage import (
    ChunkSpec,
    Rule,
    TensorChunkSpec,
    cut_rows,
    even_sizes,
    is_distributed,
    match_specs,
    open_value,
    sum_reducer,
)
from ..stage import CustomReducer as _CustomReducer
from ..stage import LossReducer as _LossReducer
from ..stage import Replicate as _Replicate
from ..stage import merge_chunks as _merge
from ..stage import split_args_kwargs_into_chunks as _split_call
from ..stage import split_tensor as _split
from .imported_names import imported_by

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


@dataclass(frozen=True, repr=False)
class _ByItself(ChunkSpec):
    """A tensor with another number of rows than the batch: cut evenly, whatever the sizes of the microbatches."""

    keeps_order = True
    dim: int

    def cut(self, value: torch.Tensor, sizes: Sequence[int], name: str) -> list[Any]:
        return cut_rows(value, self.dim, even_sizes(value.shape[self.dim], len(sizes)))

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.dim})"


@dataclass(frozen=True, repr=False)
class _LocalParts(ChunkSpec):
    """A DTensor that is sharded along the dim in which it is cut: each rank cuts its own part, without communication.

    So a microbatch does not have consecutive samples of the batch.
    """

    dim: int
    in_step: bool = True  # False: whatever sizes come of it will do

    def samples(self, value: Any, name: str) -> int | None:
        return int(value.shape[self.dim])

    def cut(self, value: Any, sizes: Sequence[int], name: str) -> list[Any]:
        made = _cut_local_part(value, self.dim, len(sizes))
        rows = [each.shape[self.dim] for each in made]
        if self.in_step and rows != list(sizes):
            raise InputError(
                f"{name} of {sum(sizes)} rows is sharded along dim {self.dim}, and if each rank cuts its own part into "
                f"{len(sizes)} the microbatches have {rows} rows, not {list(sizes)}: pass a number of rows that makes "
                "all parts equal, or redistribute() it to be replicated"
            )
        return made

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.dim})"


def _is_cut_locally(value: Any, dim: int) -> bool:
    if not is_distributed(value):
        return False
    pairs = zip(value.placements, value.device_mesh.shape, strict=True)
    return any(placement.is_shard(dim % value.dim()) and ranks > 1 for placement, ranks in pairs)


def _cut_local_part(tensor: Any, dim: int, chunks: int) -> list[Any]:
    """Cut this rank's part of a DTensor; together the local chunks are that part, and views of it."""
    from torch.distributed.tensor import DTensor

    dim %= tensor.dim()
    counts = [tensor.shape[dim]]  # the rows of all ranks that share them
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if placement.is_shard(dim):
            counts = [rows for count in counts for rows in _rows_of_ranks(count, ranks)]
    totals = map(sum, zip(*(even_sizes(count, chunks) for count in counts), strict=True))
    local = tensor.to_local()
    made = []
    for part, total in zip(cut_rows(local, dim, even_sizes(local.shape[dim], chunks)), totals, strict=True):
        shape = torch.Size([*tensor.shape[:dim], total, *tensor.shape[dim + 1 :]])
        mesh, stride = tensor.device_mesh, torch.empty(shape, device="meta").stride()
        made.append(DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride))
    return made


def _rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """Return how many of the rows of a DTensor each rank holds.

    >>> _rows_of_ranks(5, 4)
    [2, 2, 1, 0]
    """
    most = -(-rows // ranks)
    return [max(0, min(most, rows - rank * most)) for rank in range(ranks)]


_Specs = tuple[Any, Any]  # those of positional and of keyword arguments


def _specs_by_rows(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    specs: _Specs,
    samples: int | None = None,
    *,
    in_step: bool = True,
) -> _Specs:
    """Return the specs of a call in which tensors with other numbers of rows than the batch are cut by themselves.

    So are DTensors that are sharded along the dim in which they are cut, each rank's part by that rank. The batch has
    `samples`, or as many as the first tensor has rows. A tensor with fewer rows than there are microbatches keeps its
    spec, for which there is an error that says what to write.
    """
    made, odd = [], False
    for leaves, structure, rules in _opened(args, kwargs, specs):
        own: list[ChunkSpec | None] = []
        for leaf, rule in zip(leaves, rules, strict=True):
            rows = _rows(leaf, rule.spec)
            samples = rows if samples is None else samples
            spec = rule.spec if rule.given else None
            if rows is not None and _is_cut_locally(leaf, _dim(rule.spec)):
                spec, odd = _LocalParts(_dim(rule.spec), in_step), True
            elif rows is not None and rows != samples and rows >= chunks:
                spec, odd = _ByItself(_dim(rule.spec)), True
            own.append(spec)
        made.append(unflatten(structure, own))
    return (made[0], made[1]) if odd else specs


def _opened(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, specs: _Specs
) -> list[tuple[list[Any], Structure, list[Rule]]]:
    """Return the leaves of positional and of keyword arguments, and a rule for each; nothing if there are too few."""
    if isinstance(specs[0], tuple | list) and len(specs[0]) != len(args):
        return []
    opened = [open_value(tuple(args)), open_value(dict(kwargs or {}))]
    called = ("args_chunk_spec", "kwargs_chunk_spec")
    return [
        (leaves, structure, match_specs(spec, structure, name, "cut"))
        for (leaves, structure), spec, name in zip(opened, specs, called, strict=True)
    ]


def _rows(leaf: Any, spec: ChunkSpec) -> int | None:
    """Return the number of rows of a tensor along the dim in which it is cut."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(spec, TensorChunkSpec):
        return None
    return int(leaf.shape[_dim(spec)]) if -leaf.dim() <= _dim(spec) < leaf.dim() else None


def _dim(spec: ChunkSpec) -> int:
    return spec.split_dim if isinstance(spec, TensorChunkSpec) else 0


class UpstreamCutter(InputCutter):
    """Cuts the arguments of a step as upstream does: each into the number of microbatches, whatever its rows.

    Those of a traced model without specs are cut by what the trace knows of them.
    """

    def _calls(self, given: Given) -> Any:
        if self.info is not None and self.specs == (None, None):
            return super()._calls(given)
        with self._cutting(_specs_by_rows(given.args, given.kwargs, self.microbatches, self.specs)):
            return super()._calls(given)

    def _own_kwargs(self, rank: int, kwargs: Mapping[str, Any], shared: Any) -> list[dict[str, Any]]:
        samples = sum(shared.samples)
        with self._cutting(_specs_by_rows((), kwargs, len(shared.samples), (None, self.specs[1]), samples)):
            return super()._own_kwargs(rank, kwargs, shared)

    def _give_target(self, state: StepState, target: Any, shared: Any) -> None:
        before = self.target_spec
        if before is None or before == TensorChunkSpec(0):
            self.target_spec = _LocalParts(0) if _is_cut_locally(target, 0) else before
        try:
            super()._give_target(state, target, shared)
        finally:
            self.target_spec = before

    @contextlib.contextmanager
    def _cutting(self, specs: _Specs) -> Iterator[None]:
        before = self.specs
        self.specs = specs
        try:
            yield
        finally:
            self.specs = before


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
    specs = args_chunk_spec, kwargs_chunk_spec
    rows = _fewest_rows(args, kwargs, specs)
    chunks = min(chunks, rows) if rows and isinstance(chunks, int) else chunks
    try:
        return _split_call(args, kwargs, chunks, *_specs_by_rows(args, kwargs, chunks, specs, in_step=False))
    except TooFewSamplesError as error:
        if not error.samples:
            raise
        return _split_call(args, kwargs, error.samples, *specs)


def _fewest_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, specs: _Specs) -> int | None:
    """Return the smallest number of rows among the tensors of a call: there cannot be more chunks."""
    rows = [
        _rows(leaf, rule.spec)
        for leaves, _, rules in _opened(args, kwargs, specs)
        for leaf, rule in zip(leaves, rules, strict=True)
    ]
    return min((each for each in rows if each is not None), default=None)


def _names(entries: Mapping[str, Any]) -> str:
    return ", ".join(map(str, entries)) or "none"


def _split_tensor(tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int) -> Sequence[torch.Tensor]:
    if _is_cut_locally(tensor, spec.split_dim):
        return _cut_local_part(tensor, spec.split_dim, num_chunks)
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


if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
