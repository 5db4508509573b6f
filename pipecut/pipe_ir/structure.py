"""Nested Python values as leaves plus a Structure, dataclasses and objects that hold tensors included.

torch's pytree stops at types that nobody registered, and registering the user's classes would change
their process for good. A Structure also opens plain dataclasses, and gives each leaf the path that reaches it.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import pytree
from .unsent import Unsent, UnsentValue

Path = tuple[str, ...]


class Atom:
    """Base class of dataclasses that are leaves."""


@dataclasses.dataclass(frozen=True)
class NthLeaf(Atom):
    """Placeholder of the nth leaf of a call while its arguments are bound to a signature."""

    index: int


@dataclasses.dataclass(frozen=True)
class Structure:
    """Structure of a nested value: `rebuild` makes the value of its children, which `keys` lead to.

    A leaf has neither children nor `rebuild`.
    """

    kind: str
    rebuild: Callable[[list[Any]], Any] | None = None
    keys: Path = ()
    children: tuple[Structure, ...] = ()

    def paths(self) -> Iterator[Path]:
        """Yield the source text that leads from the value to each leaf: `('[0]', '.weight', "['mask']")`."""
        if self.rebuild is None:
            yield ()
        for key, child in zip(self.keys, self.children, strict=True):
            for rest in child.paths():
                yield (key, *rest)


LEAF = Structure("leaf")


def flatten(value: Any, *, holders: bool = False) -> tuple[list[Any], Structure]:
    """Return the leaves of a nested value and its Structure; `holders` opens objects with tensors inside.

    >>> leaves, structure = flatten({"a": 1, "b": (2, None)})
    >>> leaves, list(structure.paths())
    ([1, 2, None], [("['a']",), ("['b']", '[0]'), ("['b']", '[1]')])
    """
    return _flatten(value, is_tensor_holder if holders else _never)


def _never(value: Any) -> bool:
    return False


def _flatten(value: Any, is_holder: Callable[[Any], bool]) -> tuple[list[Any], Structure]:
    opened = _open(value, is_holder)
    if opened is None:
        return [value], LEAF
    keys, children, rebuild = opened
    # What belongs to a holder is put together anew with it, tensors or not.
    inside = is_plain_object if is_holder(value) else is_holder
    leaves: list[Any] = []
    structures = []
    for child in children:
        child_leaves, structure = _flatten(child, inside)
        leaves += child_leaves
        structures.append(structure)
    return leaves, Structure(type(value).__name__, rebuild, tuple(keys), tuple(structures))


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Rebuild the nested value that `flatten` took apart, with these leaves."""
    return _build(structure, iter(leaves))


def _build(part: Structure, remaining: Iterator[Any]) -> Any:
    if part.rebuild is None:
        return next(remaining)
    return part.rebuild([_build(child, remaining) for child in part.children])


def map_leaves(function: Callable[[Any], Any], value: Any, *, holders: bool = False) -> Any:
    """Replace each leaf of a nested value by `function(leaf)`; return the value itself if none changes."""
    leaves, structure = flatten(value, holders=holders)
    mapped = [function(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return unflatten(structure, mapped)


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # these lead to all that a trace knows of sizes


_NEVER = (type, types.FunctionType, types.ModuleType, torch.Tensor, nn.Module, *_NUMBERS)


_CONTAINERS = (list, tuple, set, frozenset)


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation takes or returns, alone and in lists, dicts and slices.

    >>> [tensor.item() for tensor in nested_tensors((torch.tensor(1), {"at": [slice(torch.tensor(2), 3)]}))]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from nested_tensors(item)
    elif isinstance(value, dict):
        yield from nested_tensors(tuple(value.values()))
    elif isinstance(value, slice):
        yield from nested_tensors((value.start, value.stop, value.step))


def is_tensor_holder(value: Any) -> bool:
    """Return True for an object of a Python class that has tensors in its attributes, and can be rebuilt.

    The key/value cache of a language model is such an object.

    >>> class Cache:
    ...     def __init__(self, **tensors):
    ...         self.layers = [tensors]
    >>> is_tensor_holder(Cache(keys=torch.ones(1))), is_tensor_holder(Cache())
    (True, False)
    """
    try:
        return is_plain_object(value) and _finds_tensor(value, frozenset())
    except _CircleError:
        return False


def _put_together(cls: type, names: Iterable[str], values: Iterable[Any]) -> Any:
    """Make an object of a class with these attributes; its `__init__` does not run again."""
    made: Any = object.__new__(cls)
    vars(made).update(zip(names, values, strict=True))
    return made


def is_plain_object(value: Any) -> bool:
    """Return True if a value is nothing but its attributes."""
    cls: Any = type(value)
    made_in_python = bool(cls.__flags__ & _HEAP_TYPE) and cls.__new__ is object.__new__
    if not made_in_python or isinstance(value, _NEVER) or not hasattr(value, "__dict__"):
        return False
    # What lies in slots would be lost.
    return not any(vars(base).get("__slots__") for base in cls.__mro__)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class of Python code


class _CircleError(Exception):
    """Raised for an object that leads back to itself, and cannot be taken apart."""


def _finds_tensor(value: Any, around: frozenset[int]) -> bool:
    """Return True if there is a tensor inside, or the place of one that was not sent."""
    if type(value) in (Unsent, UnsentValue) or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, _CONTAINERS):
        inside = value
    elif is_plain_object(value):
        inside = vars(value).values()
    else:
        return False
    if id(value) in around:
        raise _CircleError
    # All of them, for the circle may be behind the tensor.
    found = [_finds_tensor(item, around | {id(value)}) for item in inside]
    return any(found)


_Opened = tuple[list[str], list[Any], Callable[[list[Any]], Any]]


def _open(value: Any, is_holder: Callable[[Any], bool]) -> _Opened | None:
    """Return the keys of a value's children, the children, and a function that rebuilds it; None for a leaf."""
    opener = _OPENERS.get(type(value))
    if opener is not None:
        return opener(value)
    if isinstance(value, Tensor):
        return None
    if not pytree.tree_is_leaf(value):
        return _open_registered(value)
    if isinstance(value, dict):
        return _open_mapping(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Atom):
        return _open_dataclass(value)
    if is_holder(value):
        return _open_object(value)
    return None


def _open_dict(value: dict[Any, Any]) -> _Opened:
    keys = list(value)
    return [f"[{key!r}]" for key in keys], list(value.values()), lambda made: dict(zip(keys, made, strict=True))


def _open_mapping(value: dict[Any, Any]) -> _Opened:
    """Open a dict of another class; it is rebuilt as a copy with other values, also of its attributes."""
    keys = list(value)
    attributes = [key for key in keys if isinstance(key, str) and getattr(value, key, value) is value[key]]

    base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    emptied = copy.copy(value)  # so that nobody who keeps this keeps the values too
    base.clear(emptied)
    for name in attributes:
        vars(emptied).pop(name, None)

    def rebuild(children: list[Any]) -> Any:
        made = copy.copy(emptied)
        for key, child in zip(keys, children, strict=True):
            base.__setitem__(made, key, child)
            if key in attributes:
                object.__setattr__(made, key, child)
        return made

    return [f"[{key!r}]" for key in keys], list(value.values()), rebuild


# The common types, without the detour over the registry.
_OPENERS: dict[type, Callable[[Any], _Opened | None]] = {
    tuple: lambda value: ([f"[{index}]" for index in range(len(value))], list(value), tuple),
    torch.Size: lambda value: ([f"[{index}]" for index in range(len(value))], list(value), torch.Size),
    list: lambda value: ([f"[{index}]" for index in range(len(value))], value, list),
    dict: _open_dict,
    **dict.fromkeys(
        (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter, Unsent, UnsentValue), lambda value: None
    ),
}


def _open_dataclass(value: Any) -> _Opened:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    cls = type(value)

    def rebuild(children: list[Any]) -> Any:
        # Neither __init__ nor __post_init__ runs again: the value was made once already.
        made = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    return [f".{name}" for name in names], [getattr(value, name) for name in names], rebuild


def _open_object(value: Any) -> _Opened:
    cls, names = type(value), list(vars(value))
    return [f".{name}" for name in names], list(vars(value).values()), lambda made: _put_together(cls, names, made)


def _open_registered(value: Any) -> _Opened:
    # torch leaves a cycle behind that holds on to the function: were the value in it, it would outlive its use.
    itself = id(value)
    leaves_with_path, spec = pytree.tree_flatten_with_path(value, is_leaf=lambda inner: id(inner) != itself)
    keys = [pytree.keystr(path) for path, _ in leaves_with_path]
    children = [leaf for _, leaf in leaves_with_path]
    return keys, children, lambda made: pytree.tree_unflatten(made, spec)


def holds_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Return True if two dicts have the same objects under equal names in the same order; quick, as mostly it is so.

    >>> holds_same({"a": 1}, {"a": 1}), holds_same({"a": 1}, {"a": 2}), holds_same({"b": 1}, {"a": 1})
    (True, False, False)
    """
    same = len(one) == len(other) and all(map(operator.is_, one.values(), other.values()))
    return same and list(one) == list(other)
