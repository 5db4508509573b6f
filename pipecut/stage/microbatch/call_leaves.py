"""The arguments of a call as leaves, each under the name that the user knows it by."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import InputError
from ...pipe_ir.structure import LEAF, Atom, Path, Structure, flatten, unflatten
from .block_mask import is_block_mask


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
        names = names_by_place(arg_structure, kwarg_structure)
    else:
        names = names_by_signature(signature, arg_structure, kwarg_structure)
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


def names_by_place(args: Structure, kwargs: Structure) -> list[str]:
    """The leaves of a call without a signature: `args[0]['ids']` for a positional one, `mask` for a keyword.

    >>> names_by_place(flatten(({"ids": 1},))[1], flatten({"mask": 2})[1])
    ["args[0]['ids']", 'mask']
    """
    return [*("args" + "".join(path) for path in args.paths()), *map(_by_keyword, kwargs.paths())]


def names_by_signature(signature: inspect.Signature, args: Structure, kwargs: Structure) -> list[str]:
    """The leaves of a call under the names of the parameters, as in `TracedInput.path`.

    >>> def forward(x, *rest, scale=1.0, **options): ...
    >>> structures = [flatten(value)[1] for value in ((1, {"ids": 2}), {"mask": 3})]
    >>> names_by_signature(inspect.signature(forward), *structures)
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
