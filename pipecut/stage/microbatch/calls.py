"""Open the arguments of a call into leaves, each under the name that the user knows it by.

A trace also knows in which dim of each input the samples of the batch lie: see `batch_dims`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy

from ...errors import InputError
from ...pipe_ir import LEAF, NthLeaf, Path, Structure, TensorSpec, TracedCall, flatten, unflatten
from .tensors import is_block_mask

_REMEDY = "say where the samples are with args_chunk_spec and kwargs_chunk_spec: TensorChunkSpec(dim) or Replicate()"


@dataclasses.dataclass(frozen=True)
class Call:
    """The leaves of a call, positional ones first, and their names."""

    leaves: list[Any]
    names: list[str]
    args: Structure
    kwargs: Structure

    @property
    def named(self) -> list[tuple[str, Any]]:
        return list(zip(self.names, self.leaves, strict=True))


def open_call(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, signature: inspect.Signature | None) -> Call:
    """Flatten a call; its leaves are named by the parameters of the signature if there is one."""
    if not isinstance(args, tuple | list):
        raise InputError(
            f"args must be a tuple of positional arguments, got {type(args).__name__}; for a single one write (x,)"
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise InputError(f"kwargs must be a dict with the names of arguments as keys, got {type(kwargs).__name__}")
    arg_leaves, arg_structure = open_value(tuple(args))
    kwarg_leaves, kwarg_structure = open_value(dict(kwargs or {}))
    if signature is None:
        names = _names_by_place(arg_structure, kwarg_structure)
    else:
        names = _names_by_signature(signature, arg_structure, kwarg_structure)
    return Call([*arg_leaves, *kwarg_leaves], names, arg_structure, kwarg_structure)


def open_value(value: Any, *, holders: bool = False) -> tuple[list[Any], Structure]:
    """Flatten a value; a BlockMask is one leaf even where the user registered it as a pytree."""
    leaves, structure = flatten(value, holders=holders)
    return _close_masks(structure, iter(leaves))


def _close_masks(structure: Structure, leaves: Iterator[Any]) -> tuple[list[Any], Structure]:
    if structure.rebuild is None:
        return [next(leaves)], structure
    if structure.kind == "BlockMask":
        inside = list(itertools.islice(leaves, sum(1 for _ in structure.paths())))
        mask = unflatten(structure, inside)
        if is_block_mask(mask):
            return [mask], LEAF
        leaves = iter(inside)
    parts = [_close_masks(child, leaves) for child in structure.children]
    closed = dataclasses.replace(structure, children=tuple(child for _, child in parts))
    return [leaf for found, _ in parts for leaf in found], closed


def _names_by_place(args: Structure, kwargs: Structure) -> list[str]:
    """Name the leaves of a call without a signature: `args[0]['ids']` for a positional one, `mask` for a keyword.

    >>> _names_by_place(flatten(({"ids": 1},))[1], flatten({"mask": 2})[1])
    ["args[0]['ids']", 'mask']
    """
    return [*("args" + "".join(path) for path in args.paths()), *map(_by_keyword, kwargs.paths())]


def _names_by_signature(signature: inspect.Signature, args: Structure, kwargs: Structure) -> list[str]:
    """Name the leaves of a call by the parameters of a signature, as in `TracedInput.path`.

    >>> def forward(x, *rest, scale=1.0, **options): ...
    >>> structures = [flatten(value)[1] for value in ((1, {"ids": 2}), {"mask": 3})]
    >>> _names_by_signature(inspect.signature(forward), *structures)
    ['x', "rest[0]['ids']", "options['mask']"]
    """
    numbers = (NthLeaf(index) for index in itertools.count())
    call = [unflatten(each, list(itertools.islice(numbers, _leaf_count(each)))) for each in (args, kwargs)]
    try:
        bound = signature.bind(*call[0], **call[1])
    except TypeError as error:
        raise InputError(f"the arguments do not fit forward{signature}: {error}") from None
    found, structure = flatten(dict(bound.arguments))
    named = {leaf.index: _by_keyword(path) for path, leaf in zip(structure.paths(), found, strict=True)}
    return [named[index] for index in sorted(named)]


def _by_keyword(path: Path) -> str:
    return path[0][2:-2] + "".join(path[1:])


def _leaf_count(structure: Structure) -> int:
    return sum(1 for _ in structure.paths())


def batch_dims(call: TracedCall) -> dict[str, int | None] | None:
    """Return the batch's dim in each tensor input, None for an input without it; for `split_by_dims`.

    The batch is the size that the user calls so, otherwise the symbolic size of dim 0 of inputs. Several such sizes, or
    an input that has it in a way that cannot be cut, are an error. The whole result is None if there is no such size:
    the trace holds for one size only.

    >>> import torch
    >>> from torch import nn
    >>> from pipecut import SplitPoint, pipeline
    >>> class Net(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
    ...     def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    ...         return self.second(self.first(x) + bias)
    >>> pipe = pipeline(Net(), (torch.zeros(3, 4), torch.zeros(4)), split_spec={"second": SplitPoint.BEGINNING})
    >>> batch_dims(pipe.traced.call)
    {'x': 0, 'bias': None}
    """
    specs = {entry.path: entry.spec for entry in call.inputs if entry.spec is not None}
    candidates = _candidates(specs, call.named_dims)
    if not candidates:
        return None
    if len(candidates) > 1:
        raise InputError(_several(specs, candidates))
    return {path: _dim(path, spec, candidates[0]) for path, spec in specs.items()}


def _candidates(specs: Mapping[str, TensorSpec], named: Sequence[str]) -> list[sympy.Symbol]:
    """Return the sizes that may be the batch: one with another name is not, unless it is the only one."""
    symbols = sorted({symbol for spec in specs.values() for symbol in spec.symbols}, key=str)
    firsts = [symbol for symbol in symbols if any(symbol in spec.shape[:1] for spec in specs.values())]
    by_name = [symbol for symbol in symbols if str(symbol) == "batch" and "batch" in named]
    unnamed = [symbol for symbol in firsts if str(symbol) not in named]
    return by_name + unnamed or firsts


def _dim(path: str, spec: TensorSpec, batch: sympy.Symbol) -> int | None:
    dims = [dim for dim, size in enumerate(spec.shape) if isinstance(size, sympy.Expr) and size.has(batch)]
    if not dims:
        return None
    if len(dims) > 1 or spec.shape[dims[0]] != batch:
        raise InputError(f"{path} is {spec} in the trace, which cannot be cut along {batch}: {_REMEDY}")
    return dims[0]


def _several(specs: Mapping[str, TensorSpec], symbols: list[sympy.Symbol]) -> str:
    lines = [f"  {path} is {spec}" for path, spec in specs.items()]
    names = ", ".join(map(str, symbols))
    places = [
        next((path, spec.shape.index(symbol)) for path, spec in specs.items() if symbol in spec.shape)
        for symbol in symbols
    ]
    wishes = [
        f'"{path}": {{{dim}: "{"batch" if nth == 0 else f"rows{nth}"}"}}' for nth, (path, dim) in enumerate(places)
    ]
    named = f"name them in pipeline(), such as dynamic={{{', '.join(wishes)}}}: the one called batch is cut"
    first = f"the trace does not show which of {names} is the batch, that is to be cut:"
    return "\n".join([first, *lines, f"{named}; or {_REMEDY}"])
