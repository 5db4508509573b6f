"""Plain Python objects that hold tensors, such as the key/value cache of a language model."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # these lead to all that a trace knows of sizes
_NEVER = (type, types.FunctionType, types.ModuleType, torch.Tensor, nn.Module, *_NUMBERS)
_CONTAINERS = (list, tuple, set, frozenset)


def is_tensor_holder(value: Any) -> bool:
    """Whether a value is an object of a Python class that has tensors in its attributes, and can be put together again.

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


def put_together(cls: type, names: Iterable[str], values: Iterable[Any]) -> Any:
    """An object of a class with these attributes; its `__init__` does not run again."""
    made: Any = object.__new__(cls)
    vars(made).update(zip(names, values, strict=True))
    return made


def is_plain_object(value: Any) -> bool:
    """Whether a value is nothing but its attributes."""
    cls: Any = type(value)
    made_in_python = bool(cls.__flags__ & _HEAP_TYPE) and cls.__new__ is object.__new__
    if not made_in_python or isinstance(value, _NEVER) or not hasattr(value, "__dict__"):
        return False
    # What lies in slots would be lost.
    return not any(vars(base).get("__slots__") for base in cls.__mro__)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class of Python code


class _CircleError(Exception):
    """An object leads back to itself: there is no end to taking it apart."""


def _finds_tensor(value: Any, around: frozenset[int]) -> bool:
    """Whether there is a tensor inside."""
    if isinstance(value, torch.Tensor):
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
