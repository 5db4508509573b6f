"""Open the arguments of a call into leaves, each under the name that the user knows it by.

A trace and a call together show in which dim of each input the samples of the batch lie: see `batch_dims`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
from torch import Tensor

from ...errors import InputError
from ...pipe_ir import LEAF, FixedDim, NthLeaf, Path, Structure, TensorSpec, TracedCall, flatten, unflatten
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


@dataclasses.dataclass(frozen=True)
class BatchDims:
    """The batch's dim in each tensor input, None for an input without it, and the number of samples in the call.

    `exact` is the number of samples that each microbatch has to have, if the model's code fixed it, and `source` the
    line that did. `untied` are inputs that nothing in the code ties to the first one: they have as many rows as it in
    the example and in the call.
    """

    dims: Mapping[str, int | None]
    samples: int
    exact: int | None = None
    source: str = ""
    untied: tuple[str, ...] = ()


def batch_dims(call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BatchDims | None:
    """Return in which dims the samples of a call lie; for `split_by_dims`.

    The batch is the size that the user calls so, otherwise the symbolic size of dim 0 of inputs. Inputs that are as
    large as each other in the example and in the call belong together, whether the code ties them or not. Other sizes
    in dim 0, or an input that has the batch in a way that cannot be cut, are an error. Where the code has fixed the
    size, microbatches are of that size. The result is None if the trace does not show where the samples are.

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
    >>> batch_dims(pipe.traced.call, (torch.zeros(8, 4), torch.zeros(4)), {}).dims
    {'x': 0, 'bias': None}
    """
    tensors = {path: leaf for path, leaf in open_call(args, kwargs, call.signature).named if isinstance(leaf, Tensor)}
    every = {entry.path: entry.spec for entry in call.inputs if entry.spec is not None}
    # Of what does not fit the trace there will be an error.
    specs = {path: spec for path, spec in every.items() if path in tensors and tensors[path].dim() == len(spec.shape)}
    named, unnamed = _candidates(specs, call.named_dims)
    if not named + unnamed:
        return _fixed_batch(call, specs, tensors)
    rows = {symbol: _size_in(tensors, specs, symbol) for symbol in named + unnamed}
    batch = _together(call, specs, named, unnamed, rows)
    dims: dict[str, int | None] = dict.fromkeys(every) | {path: _dim(path, spec, batch) for path, spec in specs.items()}
    untied = tuple(path for path, spec in specs.items() if dims[path] is not None and batch[0] not in spec.shape)
    # A fixed size that is the batch's is cut too, or the rows of this input and of others would no longer match.
    fixed = [
        each
        for each in _fixed_firsts(call, specs)
        if each.size == call.hints[str(batch[0])] and _rows(tensors[each.path]) == rows[batch[0]]
    ]
    if not fixed:
        return BatchDims(dims, rows[batch[0]], *_one_size(call, batch), untied)
    exact = dict.fromkeys([each.path for each in fixed], 0)
    return BatchDims({**dims, **exact}, rows[batch[0]], _number(fixed[0].size), fixed[0].source, (*untied, *exact))


def _one_size(call: TracedCall, batch: Sequence[sympy.Symbol]) -> tuple[int | None, str]:
    """Return the only size that a symbolic batch may have, and the line that says so; None if it may have several."""
    for condition in call.conditions:
        holds = condition.holds
        if isinstance(holds, sympy.Eq) and holds.lhs in batch and isinstance(holds.rhs, sympy.Integer):
            return int(holds.rhs), condition.source
    return None, ""


def _rows(tensor: Tensor) -> int:
    return int(tensor.shape[0])


def _number(size: Any) -> int:
    return int(size)


def _fixed_firsts(call: TracedCall, specs: Mapping[str, TensorSpec]) -> list[FixedDim]:
    firsts = [each for each in call.fixed_dims if each.dim == 0 and each.path in specs]
    return [each for each in firsts if isinstance(each.size, int)]


def _fixed_batch(call: TracedCall, specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> BatchDims | None:
    """Return the dims of a batch that has one size in the trace; None if that may be several sizes."""
    every = _fixed_firsts(call, specs)
    fixed = [each for each in every if each.as_number] or every
    found = {(_number(each.size), _rows(tensors[each.path])) for each in fixed}
    if len(found) != 1:
        return None
    ((size, rows),) = found
    # What else is as large, in the example and in the call, is cut too: a loss compares labels with the batch.
    cut = [each.path for each in every if (each.size, _rows(tensors[each.path])) == (size, rows)]
    dims: dict[str, int | None] = dict.fromkeys(entry.path for entry in call.inputs if entry.spec is not None)
    return BatchDims(dims | dict.fromkeys(cut, 0), rows, size, fixed[0].source)


def _candidates(specs: Mapping[str, TensorSpec], named: Sequence[str]) -> tuple[list[sympy.Symbol], list[sympy.Symbol]]:
    """Return the size that the user calls batch, and others that may be it: not those of another name, if possible."""
    symbols = sorted({symbol for spec in specs.values() for symbol in spec.symbols}, key=str)
    firsts = [symbol for symbol in symbols if any(symbol in spec.shape[:1] for spec in specs.values())]
    by_name = [symbol for symbol in symbols if str(symbol) == "batch" and "batch" in named]
    unnamed = [symbol for symbol in firsts if str(symbol) not in named]
    # The length of a sequence that one input has first and another later is not the batch.
    lengths = {size for spec in specs.values() for size in spec.shape[1:]}
    unnamed = [symbol for symbol in unnamed if symbol not in lengths] or unnamed
    return by_name, unnamed if by_name or unnamed else firsts


def _size_in(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], symbol: sympy.Symbol) -> int:
    path, dim = _place(specs, symbol)
    return int(tensors[path].shape[dim])


def _place(specs: Mapping[str, TensorSpec], symbol: sympy.Symbol) -> tuple[str, int]:
    return next((path, spec.shape.index(symbol)) for path, spec in specs.items() if symbol in spec.shape)


def _together(
    call: TracedCall,
    specs: Mapping[str, TensorSpec],
    named: list[sympy.Symbol],
    unnamed: list[sympy.Symbol],
    rows: Mapping[sympy.Symbol, int],
) -> list[sympy.Symbol]:
    """Return the sizes that are the batch, in the order of the inputs; the one that the user names comes first."""
    sizes = {call.hints[str(symbol)] for symbol in named or unnamed}
    alike = [symbol for symbol in unnamed if call.hints[str(symbol)] in sizes]
    found = named + sorted(alike, key=lambda symbol: list(specs).index(_place(specs, symbol)[0]))
    # One row beside several is meant for all samples.
    several = [symbol for symbol in found if rows[symbol] > 1] or found
    if len(sizes) > 1 or len({rows[symbol] for symbol in several}) > 1:
        raise InputError(_several(specs, named + unnamed))
    return several


def _dim(path: str, spec: TensorSpec, batch: Sequence[sympy.Symbol]) -> int | None:
    dims = [dim for dim, size in enumerate(spec.shape) if isinstance(size, sympy.Expr) and size.has(*batch)]
    if not dims:
        return None
    if len(dims) > 1 or spec.shape[dims[0]] not in batch:
        raise InputError(f"{path} is {spec} in the trace, which cannot be cut along {batch[0]}: {_REMEDY}")
    return dims[0]


def _several(specs: Mapping[str, TensorSpec], symbols: list[sympy.Symbol]) -> str:
    lines = [f"  {path} is {spec}" for path, spec in specs.items()]
    names = ", ".join(map(str, symbols))
    wishes = [
        f'"{path}": {{{dim}: "{"batch" if nth == 0 else f"rows{nth}"}"}}'
        for nth, (path, dim) in enumerate(_place(specs, symbol) for symbol in symbols)
    ]
    named = f"name them in pipeline(), such as dynamic={{{', '.join(wishes)}}}: the one called batch is cut"
    first = f"the trace does not show which of {names} is the batch, that is to be cut:"
    return "\n".join([first, *lines, f"{named}; or {_REMEDY}"])
