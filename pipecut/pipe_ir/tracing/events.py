"""Events in the history of a run: calls of torch functions and of modules, with all that was passed to them.

Also the numbers of the tensors of a run, and the modules of a model that look alike, so that their calls may be too.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import linecache
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...torch_internals import (
    STATE_DICTS,
    FakeTensor,
    buffers_of,
    children_of,
    parameters_of,
    storage_id,
    unwrapped,
)
from ..structure import Atom
from ..traced import PLAIN_TYPES


@dataclass(frozen=True)
class TensorNumber(Atom):
    """A tensor of a run, by the order in which tensors appeared."""

    number: int


@dataclass(frozen=True)
class SizeExpression(Atom):
    """A number that the tracer computes with: a sympy expression of the sizes of inputs, or of data."""

    expr: Any


@dataclass(frozen=True)
class Line:
    """A line of code, as text only when somebody asks."""

    code: types.CodeType
    number: int


@dataclass(frozen=True)
class Called:
    """A torch function, with the tensors that it made and wrote to. `modes` are those that change what it does.

    `passed_on` has those results that are arguments: the tracer may return another tensor in their place, or not.
    """

    function: Any
    args: Any
    made: tuple[int, ...]
    written: tuple[int, ...]
    storages: tuple[tuple[int, int], ...]  # of arguments and results: number of the tensor, of its memory
    modes: tuple[Any, ...]
    line: Line | None
    passed_on: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Entered:
    """The begin of a module's call."""

    path: str
    nth_call: int
    args: Any
    line: Line | None


@dataclass(frozen=True)
class Left:
    """The end of a module's call.

    `handed_on` has the tensors that the caller gets for those of `result`, `buffers` those that were assigned anew.
    """

    result: Any
    handed_on: tuple[tuple[int, int], ...]
    buffers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Effect:
    """Something that the forward of a module did, and that no operation shows."""

    path: str
    what: str
    is_use: bool = False  # of state that Python has, by which nothing was decided otherwise in any run


@dataclass(frozen=True, eq=False)
class KeptValue:
    """A value that the forward of the module at `path` has changed in an object of Python's.

    `name` is its key or the name of the attribute or variable, if it has one. `holder` has it: a dict, a list, a class,
    the variable of a closure; the attributes of a module are named by its path, so that the model is not kept alive.
    """

    path: str
    holder: Any
    name: Any = None
    of_module: str | None = None
    is_copied: bool = False  # it belongs to a module, and a stage that has a copy of that keeps it in the copy
    used_by: frozenset[str] = frozenset()  # modules that decide by it, if it is a number
    settles: bool = True  # False: it changes in every run, as a cache does not
    is_lost: bool = False  # stages do not keep it where the model does

    def holder_in(self, model: nn.Module) -> Any:
        """Return the object that has the value."""
        return self.holder if self.of_module is None else vars(model.get_submodule(self.of_module))

    def changer(self, model: nn.Module) -> str:
        """Return the name of the module that has changed it."""
        return repr(self.path) if self.path else type(model).__name__

    def who(self, model: nn.Module) -> str:
        """Return which code has changed it, and why stages do not, in words."""
        name = self.changer(model)
        if self.is_copied:
            return f"{name} changes: a stage runs a copy of that module, and changes the copy's"
        return f"{name} changes: it is cut, and the generated code does not do that"


Event: TypeAlias = Called | Entered | Left


@dataclass(frozen=True)
class History:
    """One run. `inputs` are its tensor inputs, `sizes` their shapes, `state` parameters and buffers by name.

    `constants` are tensors from elsewhere. `symbols` are the tracer's for the sizes of inputs, by input and dim.
    """

    events: tuple[Event, ...]
    inputs: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    symbols: Mapping[Any, tuple[int, int]]
    state: Mapping[str, int]
    constants: Mapping[int, Tensor]
    effects: tuple[Effect, ...] = ()


def line_text(line: Line) -> str:
    """Return a line of code as messages have it: file, line, function and code."""
    filename = line.code.co_filename
    code = linecache.getline(filename, line.number).strip()
    return f"{filename}:{line.number}, in {line.code.co_name}" + (f": {code}" if code else "")


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Numbers:
    """Numbers of the tensors of one run, or of several in a row: what one leaves behind, the next may use.

    The tensors are kept alive, as their identities count.
    """

    count: int = 0
    known: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)  # the first of each number
    met: set[int] = field(default_factory=set)  # numbers of tensors from elsewhere
    unseen: int = 0  # tensors that came about unseen, in the memory of others
    constants: dict[int, Tensor] = field(default_factory=dict)
    _storages: dict[Any, int] = field(default_factory=dict)
    _last_made: dict[int, int] = field(default_factory=dict)  # in each storage
    _alive: list[Tensor] = field(default_factory=list)

    def of(self, tensor: Tensor) -> int:
        """Return the number of a tensor; one that is met for the first time comes from elsewhere.

        If it lies in the memory of one that is known, it is that one: torch.vmap wraps and unwraps tensors unseen.
        """
        number = self.known.get(id(tensor))
        if number is None:
            number = self._last_made.get(self.storage(tensor))
            if number is None:
                number = self._next(tensor)
                self.met.add(number)
                if not isinstance(unwrapped(tensor), FakeTensor):
                    self.constants[number] = tensor
            else:
                self.known[id(tensor)] = number
                self._alive.append(tensor)
                self.unseen += 1
        return number

    def new(self, tensor: Tensor) -> int:
        """Return the number of a tensor that the run itself has made."""
        number = self.known.get(id(tensor))
        if number is None:
            number = self._next(tensor)
            self._last_made[self.storage(tensor)] = number
        self.constants.pop(number, None)
        self.met.discard(number)
        return number

    def storage(self, tensor: Tensor) -> int:
        """Return the number of the memory that a tensor is in; a negative one if it has none to speak of."""
        try:
            memory = storage_id(unwrapped(tensor))
        except (NotImplementedError, RuntimeError):  # sparse tensors and the like
            return -1 - id(tensor)
        return self._storages.setdefault(memory, len(self._storages))

    def share(self, one: Tensor, other: Tensor) -> None:
        """Treat the memory of one tensor as that of another."""
        with contextlib.suppress(NotImplementedError, RuntimeError):  # as above
            self._storages[storage_id(unwrapped(one))] = self.storage(other)

    @property
    def storages(self) -> int:
        """The number that the next memory gets."""
        return len(self._storages)

    def is_before(self, memory: int, storages: int) -> bool:
        """Return True if a memory was known when there were so many of them."""
        return self._storages.get(memory, storages) < storages

    def new_storage(self) -> int:
        """Return the number of a memory that no tensor is in."""
        return self._storages.setdefault(object(), len(self._storages))

    def adopt(self, tensor: Tensor, number: int, memory: int) -> None:
        """Give a tensor that the run itself has made a number, and its memory another."""
        self._keep(tensor, number)
        self._storages[storage_id(tensor)] = memory
        self._last_made[memory] = number

    def _next(self, tensor: Tensor) -> int:
        number, self.count = self.count, self.count + 1
        self._keep(tensor, number)
        return number

    def _keep(self, tensor: Tensor, number: int) -> None:
        self.known[id(tensor)] = number
        self.tensors[number] = tensor


def new_buffers(module: nn.Module, before: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers of a module that are other tensors than before."""
    now = buffers_of(module)
    return {name: tensor for name, tensor in now.items() if tensor is not None and tensor is not before.get(name)}


_LEAST_MODULES = 3  # in a module that is worth the comparison


def other_path(one: History, other: History) -> str | None:
    """Return the path of the module in which two runs begin to call other functions or modules; None if they do not."""
    opened: list[str] = []
    for event, its in itertools.zip_longest(one.events, other.events):
        called = [getattr(each, "function", getattr(each, "path", None)) for each in (event, its)]
        if type(event) is not type(its) or called[0] != called[1]:
            return opened[-1] if opened else ""
        if isinstance(event, Entered):
            opened.append(event.path)
        elif isinstance(event, Left):
            opened.pop()
    return None


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
