"""Separate memory for stages in one process: the same Python objects, with the contents that they have on each rank.

On ranks every process has its own copy of everything. In one process a hook of one stage and the loss_fn may share a
list, a closure, a variable of a module, or the whole model. Here these objects stay what they are, and get other
contents while a stage computes: lists, dicts, sets, attributes, closures and variables that the hooks, functions and
classes of the stage lead to. Tensors in them are copies.

State that Python does not show is shared as before: that of objects written in C (iterators, generators of random
numbers), of installed packages, files, the environment.
"""

from __future__ import annotations

import collections
import copy
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..text import listed, numbered
from ..torch_internals import TorchDispatchMode, hooks_of, storage_id, tensor_hooks, version_of
from .named_state import has_attributes, is_own_class, is_own_code, used_variables
from .structure import flatten

_MOST = 1_000_000  # entries of a container that is given contents of its own
_EMPTY = object()  # the contents of a closure's variable that has no value yet
_SHOWN = 3
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass
class Space:
    """The memory of one owner: its copies of tensors by the id of the original, and the contents of containers."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    originals: list[Any] = field(default_factory=list)  # kept, so that ids stay theirs
    contents: dict[int, Any] = field(default_factory=dict)
    before: dict[int, list[Any]] = field(default_factory=dict)  # the values in them at first
    _storages: dict[int, Any] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)

    def share(self, tensor: Tensor) -> None:
        """Let this memory have a tensor itself, and with it all that lies in the same storage."""
        self.tensors[id(tensor)] = tensor
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
            self._storages[storage_id(tensor)] = tensor.untyped_storage()

    def tensor(self, original: Tensor) -> Tensor:
        """Return the copy of a tensor; those of tensors that share memory share it too."""
        if id(original) not in self.tensors:
            self.originals.append(original)
            made = self.tensors[id(original)] = self._copied(original)
            self._versions[id(original)] = version_of(made)
        return self.tensors[id(original)]

    def is_changed(self, original: Tensor) -> bool:
        """Return True if the copy of a tensor was written to."""
        return version_of(self.tensors[id(original)]) != self._versions[id(original)]

    def _copied(self, original: Tensor) -> Tensor:
        plain = type(original) in (Tensor, nn.Parameter) and original.layout == torch.strided
        if plain and original.device.type != "meta" and not (original.is_conj() or original.is_neg()):
            key = storage_id(original)
            if key not in self._storages:
                storage: Any = original.untyped_storage()
                self._storages[key] = storage.clone()
            place = original.storage_offset(), original.size(), original.stride()
            made = torch.empty(0, dtype=original.dtype, device=original.device).set_(self._storages[key], *place)
        else:
            made = copy.deepcopy(original.detach())
        if isinstance(original, nn.Parameter):
            made = nn.Parameter(made, original.requires_grad)
        elif original.requires_grad:
            made.requires_grad_()
        for hook in (tensor_hooks(original) or {}).values():
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    def mapped(self, value: Any) -> Any:
        """Return a value with copies of the tensors and arrays in it; containers in it have contents of their own."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if type(value) is tuple:
            return tuple(map(self.mapped, value))
        if type(value).__module__ == "numpy" and hasattr(value, "shape"):
            return value.copy()
        return value


class _Container:
    """An object whose contents can be replaced; `told` says where it was found, `also` where else."""

    def __init__(self, holder: Any, told: str) -> None:
        self.holder = holder
        self.told = told
        self.also: list[str] = []

    @property
    def places(self) -> str:
        """All places where it was found, in words."""
        return listed([self.told, *self.also], _SHOWN)

    def read(self) -> Any:
        """Return the contents."""
        return _READ[type(self.holder)](self.holder)

    def write(self, contents: Any) -> None:
        """Replace the contents."""
        _WRITE[type(self.holder)](self.holder, contents)

    def inside(self) -> list[tuple[Any, str]]:
        """Return the values in it, and where they were found."""
        return [(value, self.told) for value in _values(self.read())]


class _Names(_Container):
    """Some names of a namespace, `told`: the variables of a module that functions use, or the attributes of a class."""

    def __init__(self, holder: Any, told: str, names: Iterable[str]) -> None:
        super().__init__(holder, told)
        self.names = set(names)

    def inside(self) -> list[tuple[Any, str]]:
        return [(value, f"{name!r} in {self.told}") for name, value in self.read().items()]

    def read(self) -> dict[str, Any]:
        known = vars(self.holder) if isinstance(self.holder, type) else self.holder
        return {name: known[name] for name in self.names if name in known}

    def write(self, contents: Any) -> None:
        before = self.read()
        for name in before.keys() - contents.keys():
            delattr(self.holder, name) if isinstance(self.holder, type) else self.holder.pop(name)
        for name, value in contents.items():
            if before.get(name, _EMPTY) is value:
                continue
            if isinstance(self.holder, type):
                setattr(self.holder, name, value)
            else:
                self.holder[name] = value


def _read_cell(cell: types.CellType) -> Any:
    try:
        return [cell.cell_contents]
    except ValueError:
        return [_EMPTY]


def _write_cell(cell: types.CellType, contents: Any) -> None:
    if contents[0] is not _EMPTY:
        cell.cell_contents = contents[0]
    elif _read_cell(cell)[0] is not _EMPTY:
        del cell.cell_contents


def _refill(holder: Any, contents: Any) -> None:
    holder.clear()
    (holder.extend if isinstance(holder, list | collections.deque) else holder.update)(contents)


_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_READ: dict[type, Callable[[Any], Any]] = {
    list: list,
    set: set,
    collections.deque: list,
    types.CellType: _read_cell,
    **dict.fromkeys(_MAPPINGS, dict),
}
_WRITE: dict[type, Callable[[Any, Any], None]] = {**dict.fromkeys(_READ, _refill), types.CellType: _write_cell}


def _values(contents: Any) -> Iterable[Any]:
    return list(contents.values()) if isinstance(contents, dict) else contents


def _mapped_contents(contents: Any, space: Space) -> Any:
    if isinstance(contents, dict):
        return {key: space.mapped(value) for key, value in contents.items()}
    return type(contents)(map(space.mapped, contents))


class Memories:
    """The memories of several owners. `roots` are what each of them computes with; `apart` are objects left alone.

    >>> log: list[str] = []
    >>> def hook(text: str) -> None:
    ...     log.append(text)
    >>> memories = Memories({0: [hook], 1: [hook]}, {0: Space(), 1: Space()})
    >>> memories.switch(0)
    >>> hook("stage 0")
    >>> memories.switch(1)
    >>> log
    []
    >>> memories.switch(None)
    >>> memories.shared_and_changed()
    ["'log' in pipecut.pipe_ir.memory is one object for stages 0, 1"]
    """

    def __init__(
        self, roots: Mapping[int, Iterable[Any]], spaces: Mapping[int, Space], apart: Iterable[Any] = ()
    ) -> None:
        self._spaces = spaces
        self._apart = {id(each) for each in apart}
        self._containers: dict[int, _Container] = {}
        self._reached = {owner: self._reach(values) for owner, values in roots.items()}
        self._saved: dict[int, Any] = {}
        self._active: int | None = None

    def switch(self, owner: int | None) -> None:
        """Give all objects the contents that they have for an owner; None: their own."""
        if owner == self._active:
            return
        if self._active is not None:
            space = self._spaces[self._active]
            for number, container in self._reached[self._active].items():
                space.contents[number] = container.read()
                container.write(self._saved.pop(number))
        self._active = owner
        if owner is not None:
            space = self._spaces[owner]
            for number, container in self._reached[owner].items():
                self._saved[number] = container.read()
            for number, container in self._reached[owner].items():
                if number not in space.contents:
                    space.contents[number] = _mapped_contents(self._saved[number], space)
                    space.before[number] = list(_values(space.contents[number]))
                container.write(space.contents[number])

    @property
    def containers(self) -> list[_Container]:
        """All objects whose contents can be replaced."""
        return list(self._containers.values())

    def shared_and_changed(self, owners: Sequence[int] | None = None) -> list[str]:
        """Say which objects several owners reach, and at least one has changed."""
        found = {}
        for number, container in self._containers.items():
            users = [owner for owner in self._reached if number in self._reached[owner]]
            users = [owner for owner in users if owners is None or owner in owners]
            if len(users) > 1 and any(self._is_changed(number, owner) for owner in users):
                found[container.places] = f"{container.places} is one object for {numbered('stage', users)}"
        return list(found.values())

    def _is_changed(self, number: int, owner: int) -> bool:
        space = self._spaces[owner]
        now, before = list(_values(space.contents.get(number, ()))), space.before.get(number, [])
        return len(now) != len(before) or any(map(operator.is_not, now, before))

    def _reach(self, roots: Iterable[Any]) -> dict[int, _Container]:
        """Return the containers that some values lead to."""
        found: dict[int, _Container] = {}
        seen: dict[int, Any] = {}
        waiting = [(root, "") for root in roots]
        while waiting:
            value, told = waiting.pop()
            if type(value) in _PLAIN or isinstance(value, Tensor) or id(value) in seen or id(value) in self._apart:
                continue
            seen[id(value)] = value
            for container in self._containers_in(value, told):
                found[id(container.holder)] = container
                waiting += container.inside()
            waiting += _leads_to(value, told)
        return found

    def _containers_in(self, value: Any, told: str) -> Iterator[_Container]:
        if type(value) in _READ:
            if type(value) is types.CellType or len(value) <= _MOST:
                yield self._known(_Container(value, told))
        elif has_attributes(value):
            yield self._known(_Container(vars(value), told or f"an attribute of {type(value).__name__}"))
        elif isinstance(value, type) and is_own_class(value):
            names = [name for name, each in vars(value).items() if _is_data(name, each)]
            yield self._known(_Names(value, f"class {value.__name__}", names))
        elif isinstance(value, types.FunctionType) and is_own_code(value.__code__.co_filename):
            for where, known, used in used_variables(value):
                container = self._known(_Names(known, where, ()))
                if isinstance(container, _Names):  # and not the whole namespace, which was reached as a dict
                    container.names.update(used)
                yield container

    def _known(self, container: _Container) -> _Container:
        known = self._containers.setdefault(id(container.holder), container)
        if container.told not in (known.told, *known.also):
            known.also.append(container.told)
        return known


def _leads_to(value: Any, told: str) -> list[tuple[Any, str]]:
    """Return what a value refers to besides its contents."""
    if isinstance(value, types.FunctionType):
        where = f"{value.__qualname__} ({Path(value.__code__.co_filename).name}:{value.__code__.co_firstlineno})"
        names = value.__code__.co_freevars
        cells = [(cell, f"{name!r} of {where}") for name, cell in zip(names, value.__closure__ or (), strict=True)]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [*cells, *((default, f"a default of {where}") for default in defaults)]
    if isinstance(value, types.MethodType):
        return [(value.__self__, told), (value.__func__, told)]
    if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType):
        return [(value.__self__, told)]
    if isinstance(value, functools.partial):
        return [(each, told) for each in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, tuple | frozenset):
        return [(each, told) for each in value]
    if isinstance(value, type):
        functions = [getattr(each, "__func__", each) for each in vars(value).values()] if is_own_class(value) else []
        bases = [base for base in value.__mro__[1:] if is_own_class(base)]
        return [(each, told) for each in (*bases, *functions) if isinstance(each, type | types.FunctionType)]
    return [(type(value), told)] if has_attributes(value) else []


def _is_data(name: str, value: Any) -> bool:
    """Return True for an attribute of a class that may hold state."""
    code = (types.FunctionType, staticmethod, classmethod, property, type, types.MemberDescriptorType)
    return not name.startswith(("__", "_abc_")) and not isinstance(value, code) and not hasattr(value, "__set_name__")


def tensors_in_reach(roots: Iterable[Any], apart: Iterable[Any]) -> list[Tensor]:
    """Return the tensors that functions and classes lead to, by closures, attributes, variables and what is in them."""
    containers = Memories({0: roots}, {}, apart).containers
    return [value for each in containers for value, _ in each.inside() if isinstance(value, Tensor)]


def storages_of(module: nn.Module) -> set[int]:
    """Return the storages in which a module's plain parameters and buffers lie."""
    tensors = (*module.parameters(), *module.buffers())
    return {storage_id(tensor) for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)}


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function for each use of the watched tensors, by storage: with a name and the line of the user's code."""

    def __init__(self, watched: Mapping[int, str], found: Callable[[str, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched, self._found = watched, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, _ = flatten((args, kwargs or {}))
        for leaf in leaves:
            name = self._watched.get(storage_id(leaf)) if type(leaf) in (Tensor, nn.Parameter) else None
            if name is not None:
                self._found(name, _own_line())
        return func(*args, **(kwargs or {}))


def _own_line() -> str:
    """Return the innermost line of the user's code that is running; nothing if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_own_code(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def functions_around(module: nn.Module) -> list[Any]:
    """Return the hooks of all parts of a module, functions among their attributes, and their classes."""
    found: list[Any] = []
    for part in module.modules():
        found += [type(part), *hooks_of(part)]
        for value in vars(part).values():
            if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                found.append(value)
        for parameter in part.parameters(recurse=False):
            found += (tensor_hooks(parameter) or {}).values()
    return found
