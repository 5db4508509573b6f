"""The arguments of a call as leaves, each under the name that the user knows it by."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy

from ...errors import InputError, TooFewSamplesError
from ...pipe_ir import LEAF, Atom, Path, Structure, TensorSpec, TracedCall, flatten, unflatten
from .spec import Replicate, Rule, Spec, TensorChunkSpec, written_call
from .tensors import even_sizes, is_block_mask, samples_of


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
    """A call's leaves, named by the parameters of the signature if there is one."""
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
    """`flatten`, in which a BlockMask is one leaf even where the user registered it as a pytree."""
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
    """The leaves of a call without a signature: `args[0]['ids']` for a positional one, `mask` for a keyword.

    >>> _names_by_place(flatten(({"ids": 1},))[1], flatten({"mask": 2})[1])
    ["args[0]['ids']", 'mask']
    """
    return [*("args" + "".join(path) for path in args.paths()), *map(_by_keyword, kwargs.paths())]


def _names_by_signature(signature: inspect.Signature, args: Structure, kwargs: Structure) -> list[str]:
    """The leaves of a call under the names of the parameters, as in `TracedInput.path`.

    >>> def forward(x, *rest, scale=1.0, **options): ...
    >>> structures = [flatten(value)[1] for value in ((1, {"ids": 2}), {"mask": 3})]
    >>> _names_by_signature(inspect.signature(forward), *structures)
    ['x', "rest[0]['ids']", "options['mask']"]
    """
    numbers = (_Nth(index) for index in itertools.count())
    call = [unflatten(each, list(itertools.islice(numbers, _leaf_count(each)))) for each in (args, kwargs)]
    try:
        bound = signature.bind(*call[0], **call[1])
    except TypeError as error:
        raise InputError(f"the arguments do not fit forward{signature}: {error}") from None
    found, structure = flatten(dict(bound.arguments))
    named = {leaf.index: _by_keyword(path) for path, leaf in zip(structure.paths(), found, strict=True)}
    return [named[index] for index in sorted(named)]


@dataclasses.dataclass(frozen=True)
class _Nth(Atom):
    """Stands for the nth leaf of a call while it is bound to a signature."""

    index: int


def _by_keyword(path: Path) -> str:
    return path[0][2:-2] + "".join(path[1:])


def _leaf_count(structure: Structure) -> int:
    return sum(1 for _ in structure.paths())


# MERGED: How many samples a call has, which all arguments that are cut must agree on.


def agreed_sizes(
    call: Call,
    chunks: int,
    dims: Sequence[int | None],
    rules: Sequence[Rule],
    knows_batch: bool,
    fewer: bool = False,
) -> tuple[int, ...] | None:
    """The sizes of the microbatches; None if no leaf is cut. `dims` and `rules` are those of the leaves.

    With `fewer`, too few samples make fewer microbatches, of one sample each.
    """
    samples = {
        index: samples_of(leaf, dim)
        for index, (leaf, dim) in enumerate(zip(call.leaves, dims, strict=True))
        if dim is not None
    }
    if not samples:
        return None
    if len(set(samples.values())) > 1:
        remedy = _same_batch() if knows_batch else _other_specs(call, dims, rules, samples)
        raise InputError("\n".join([*_disagreement(call, chunks, dims, samples), *remedy]))
    first, total = next(iter(samples.items()))
    if fewer and 0 < total < chunks:
        return even_sizes(total, total)
    if total < chunks:
        place = f"{call.names[first]} has shape {list(call.leaves[first].shape)}, cut along dim {dims[first]}"
        most = f", or ask for fewer microbatches, at most {total}" if total else ""
        raise TooFewSamplesError(
            f"{total} {'sample' if total == 1 else 'samples'} cannot be cut into {chunks} microbatches ({place}): "
            f"pass at least {chunks}{most}"
        )
    return even_sizes(total, chunks)


def _disagreement(call: Call, chunks: int, dims: Sequence[int | None], samples: Mapping[int, int]) -> list[str]:
    return [
        f"the arguments to be cut into {chunks} microbatches do not have the same number of samples:",
        *(
            f"  {call.names[index]} of shape {list(call.leaves[index].shape)} has {count} along dim {dims[index]}"
            for index, count in samples.items()
        ),
    ]


def _same_batch() -> list[str]:
    return ["for the model they are the samples of one batch: pass as many in each"]


def _other_specs(
    call: Call, dims: Sequence[int | None], rules: Sequence[Rule], samples: Mapping[int, int]
) -> list[str]:
    """What to write if the arguments that differ from most of the others are not of the batch."""
    ((batch, _),) = collections.Counter(samples.values()).most_common(1)
    odd = [index for index, count in samples.items() if count != batch]
    specs = [
        _wished(leaf, None if index in odd else dim, rule, index in odd)
        for index, (leaf, dim, rule) in enumerate(zip(call.leaves, dims, rules, strict=True))
    ]
    return [
        f"if {' and '.join(call.names[index] for index in odd)} should go to every microbatch whole, write",
        f"  {written_call(call.args, call.kwargs, specs)}",
        "and if the samples lie along another dim, TensorChunkSpec(dim) there",
    ]


def _wished(leaf: Any, dim: int | None, rule: Rule, odd: bool) -> Spec | None:
    if dim is not None:
        return TensorChunkSpec(dim)
    # What nobody cuts, such as a number, needs no spec: it stays whole inside anything that is cut.
    return Replicate() if odd or rule.spec is not None or is_block_mask(leaf) else None


# MERGED: In which dim of each input a trace has the batch.


_REMEDY = "say where the samples are with args_chunk_spec and kwargs_chunk_spec: TensorChunkSpec(dim) or Replicate()"


def batch_dims(call: TracedCall) -> dict[str, int | None] | None:
    """The batch's dim in each tensor input, None for an input without it; for `split_by_dims`.

    The batch is the size that the user calls so, or else the symbolic size of dim 0 of inputs. If there are several, or
    if an input has it in a way that cannot be cut, that is an error. The whole result is None if there is none: the
    trace holds for one size only.

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
    """The sizes that may be the batch: a name for another size says that it is not, unless it is the only one."""
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
    first = f"the trace does not tell which of {names} is the batch, that is to be cut:"
    return "\n".join([first, *lines, f"{named}; or {_REMEDY}"])
