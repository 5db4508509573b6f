"""Modules of a model that look alike, so that their calls may be too."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import STATE_DICTS, buffers_of, children_of, parameters_of
from ..traced import PLAIN_TYPES
from .numbers import SYMBOLIC

_LEAST_MODULES = 3  # in a module that is worth the comparison


class Repeats:
    """Modules of a model that look alike, by their paths; those that turned out to differ are left out.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
    >>> Repeats(model).groups
    {'0': 0, '1': 0, '2': 0}
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups = _groups(model)
        self._diverged: collections.Counter[int] = collections.Counter()

    def leave_out(self, path: str) -> None:
        """Compute the calls of a module as if nothing were like it; after a second one, of all of its group."""
        group = self.groups.pop(path)
        self._diverged[group] += 1
        if self._diverged[group] > 1:
            self.groups = {each: number for each, number in self.groups.items() if number != group}


def _groups(model: nn.Module) -> dict[str, int]:
    """Return a number for each module that others look like; of a module and those inside it, for one of them only."""
    numbers: dict[Any, int] = {}
    sizes: dict[int, int] = {}
    members: dict[int, list[str]] = {}

    def describe(path: str, module: nn.Module) -> int:
        children = {name: child for name, child in children_of(module).items() if child is not None}
        inside = tuple((name, describe(f"{path}.{name}".lstrip("."), child)) for name, child in children.items())
        number = numbers.setdefault((_looks(module), inside), len(numbers))
        sizes[number] = 1 + sum(sizes[each] for _, each in inside)
        members.setdefault(number, []).append(path)
        return number

    describe("", model)
    worth = {number: sizes[number] * (len(paths) - 1) for number, paths in members.items()}
    found: dict[str, int] = {}
    around: set[str] = set()
    for number in sorted(members, key=lambda number: -worth[number]):
        paths = members[number]
        if worth[number] and sizes[number] >= _LEAST_MODULES and not _overlap(paths, found, around):
            found |= dict.fromkeys(paths, number)
            around.update(above for path in paths for above in _ancestors(path))
    return {path: sorted(set(found.values())).index(number) for path, number in found.items()}


def _overlap(paths: Sequence[str], found: Mapping[str, int], around: set[str]) -> bool:
    return any(path in around or path in found or any(up in found for up in _ancestors(path)) for path in paths)


def _ancestors(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _looks(module: nn.Module) -> Any:
    """Return what can be seen of a module itself: its class, tensors and plain attributes.

    Of whole numbers only the names: many modules know their place among others. Whatever comes of that is compared.
    """
    tensors = (*parameters_of(module).items(), *buffers_of(module).items())
    attributes = ((name, value) for name, value in vars(module).items() if name not in STATE_DICTS)
    return (
        type(module),
        tuple((name, None if tensor is None else spec_of(tensor)) for name, tensor in tensors),
        tuple((name, _shown(value)) for name, value in attributes),
    )


def _shown(value: Any) -> Any:
    if type(value) is int or not isinstance(value, PLAIN_TYPES):
        return type(value).__name__
    return type(value).__name__, repr(value)


def spec_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that an operator can see of a tensor but its values."""
    strided = tensor.layout == torch.strided
    return (
        type(tensor),
        _sizes(tensor.shape),
        _sizes(tensor.stride()) if strided else (),
        _sizes((tensor.storage_offset(),)) if strided else (),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _sizes(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(size.node.expr if isinstance(size, SYMBOLIC) else size for size in sizes)
