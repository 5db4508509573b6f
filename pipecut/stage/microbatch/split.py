"""A call's arguments cut into those of the microbatches.

Every tensor that is cut is cut into the same sizes, along the dim in which its samples lie: row i of one argument and
row i of another stay together. Where that is not certain, the call is refused. Chunks are views: nothing is copied, and
a gradient that reaches a chunk reaches the tensor that it is of.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError, SpecCountError
from ...pipe_ir import unflatten
from .calls import Call, agreed_sizes, open_call
from .spec import Replicate, Rule, TensorChunkSpec, match_specs
from .tensors import cut, cut_dim


@dataclass(frozen=True)
class Microbatches:
    """The calls of the microbatches; `sizes` are their numbers of samples, or None if nothing was cut.

    `dims` are those along which the leaves of the call were cut, None for what every microbatch has whole.
    """

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    sizes: tuple[int, ...] | None
    dims: tuple[int | None, ...] = ()


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    *,
    fewer: bool = False,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The positional and the keyword arguments of each microbatch; see `split_by_specs`.

    With `fewer`, too few samples are no error, and make fewer microbatches.

    >>> args, kwargs = split_args_kwargs_into_chunks((torch.arange(5), "gelu"), {"y": torch.arange(5)}, 2)
    >>> args
    [(tensor([0, 1, 2]), 'gelu'), (tensor([3, 4]), 'gelu')]
    >>> kwargs
    [{'y': tensor([0, 1, 2])}, {'y': tensor([3, 4])}]
    """
    made = split_by_specs(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec, fewer=fewer)
    return made.args, made.kwargs


def split_by_specs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    *,
    fewer: bool = False,
) -> Microbatches:
    """Cut a call as the specs say.

    `args_chunk_spec` is a tuple with an entry for each positional argument, `kwargs_chunk_spec` a dict with the names
    of keyword arguments. An entry is TensorChunkSpec(dim), Replicate(), None for the default, or a nested value of
    these for a nested argument. By default a tensor is cut along dim 0, if it has one; a BlockMask along its batch, if
    that is not 1; and all other values go to every microbatch.

    >>> x, table = torch.zeros(5, 2), torch.zeros(7, 2)
    >>> split_by_specs((x, table), None, 2, (None, Replicate())).sizes
    (3, 2)
    """
    _check_chunks(chunks)
    call = open_call(args, kwargs, None)
    if not args and not kwargs:
        return Microbatches([()] * chunks, [{} for _ in range(chunks)], None)
    if isinstance(args_chunk_spec, tuple | list) and len(args_chunk_spec) != len(args):
        raise SpecCountError(
            f"args_chunk_spec has entries for {len(args_chunk_spec)} arguments, and there are {len(args)} "
            "positional ones: write None for an argument that is cut in the default way"
        )
    kinds = (TensorChunkSpec, Replicate)
    rules = [
        *match_specs(args_chunk_spec, call.args, "args_chunk_spec", kinds),
        *match_specs(kwargs_chunk_spec, call.kwargs, "kwargs_chunk_spec", kinds),
    ]
    return _split(call, chunks, rules, knows_batch=False, fewer=fewer)


def split_by_dims(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    dims: Mapping[str, int | None],
    signature: inspect.Signature,
) -> Microbatches:
    """Cut a call where it is known in which dim of each tensor the samples lie, None for a tensor that has none.

    The tensors are named as in `TracedInput.path`: by the parameters of `signature`, that of the model's forward.

    >>> def forward(x, batch): ...
    >>> call = (torch.zeros(2, 5),), {"batch": {"mask": torch.zeros(5), "table": torch.zeros(9)}}
    >>> dims = {"x": 1, "batch['mask']": 0, "batch['table']": None}
    >>> first, second = split_by_dims(*call, 2, dims, inspect.signature(forward)).kwargs
    >>> second["batch"]["mask"].shape, second["batch"]["table"].shape
    (torch.Size([2]), torch.Size([9]))
    """
    _check_chunks(chunks)
    call = open_call(args, kwargs, signature)
    return _split(call, chunks, [_known(name, leaf, dims) for name, leaf in call.named], knows_batch=True)


def split_tensor(tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int) -> list[torch.Tensor]:
    """One tensor's chunks.

    >>> [chunk.shape for chunk in split_tensor(torch.zeros(2, 5), TensorChunkSpec(1), 2)]
    [torch.Size([2, 3]), torch.Size([2, 2])]
    """
    made = split_by_specs((), {"tensor": tensor}, num_chunks, None, {"tensor": spec})
    return [kwargs["tensor"] for kwargs in made.kwargs]


# The name that torch.distributed.pipelining has for it.
_split_tensor = split_tensor


def _check_chunks(chunks: int) -> None:
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise InputError(f"the number of microbatches must be an integer of at least 1; got {chunks!r}")


def _known(name: str, leaf: Any, dims: Mapping[str, int | None]) -> Rule:
    if name in dims:
        dim = dims[name]
        return Rule(Replicate() if dim is None else TensorChunkSpec(dim), exact=True)
    if isinstance(leaf, torch.Tensor):
        raise InputError(
            f"{name} is a tensor {list(leaf.shape)}, and it is not known in which dim its samples are: "
            f"they are known of {', '.join(dims) or 'no argument'}"
        )
    return Rule(None, exact=False)


def _split(call: Call, chunks: int, rules: Sequence[Rule], knows_batch: bool, fewer: bool = False) -> Microbatches:
    dims = [cut_dim(name, leaf, rule) for (name, leaf), rule in zip(call.named, rules, strict=True)]
    sizes = agreed_sizes(call, chunks, dims, rules, knows_batch, fewer)
    chunks = chunks if sizes is None else len(sizes)
    pieces = _cut_all(call.leaves, dims, chunks, sizes)
    count = sum(1 for _ in call.args.paths())
    return Microbatches(
        [unflatten(call.args, [piece[index] for piece in pieces[:count]]) for index in range(chunks)],
        [unflatten(call.kwargs, [piece[index] for piece in pieces[count:]]) for index in range(chunks)],
        sizes,
        tuple(dims),
    )


def _cut_all(
    leaves: Sequence[Any], dims: Sequence[int | None], chunks: int, sizes: tuple[int, ...] | None
) -> list[list[Any]]:
    # One tensor passed twice stays one tensor in every microbatch.
    made: dict[tuple[int, int], list[Any]] = {}
    pieces = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is None or sizes is None:
            pieces.append([leaf] * chunks)
            continue
        if (id(leaf), dim) not in made:
            made[id(leaf), dim] = cut(leaf, dim, sizes)
        pieces.append(made[id(leaf), dim])
    return pieces
