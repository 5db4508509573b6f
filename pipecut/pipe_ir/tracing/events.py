"""Events in the history of a run: calls of torch functions and of modules, with all that was passed to them.

Also the numbers of the tensors of a run.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from ...torch_internals import (
    FakeTensor,
    buffers_of,
    storage_id,
    unwrapped,
)
from ..structure import Atom


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


@dataclass(frozen=True, eq=False)
class RepeatedEvents:
    """The events of a call that others are like.

    `given` are its arguments and its state, each with the place or the name that it has for the module; `outside` are
    other tensors that it has not made, in the order in which it uses them. `is_closed` is False if it writes to any.
    """

    events: tuple[Event, ...]
    given: tuple[tuple[int | str, int], ...]
    outside: tuple[int, ...]
    own: frozenset[int]
    is_closed: bool

    @classmethod
    def of(
        cls, events: tuple[Event, ...], given: Sequence[tuple[Any, int]], owns: Callable[[int], bool], storages: int
    ) -> RepeatedEvents:
        """Find the tensors that a call uses; memories below `storages` are not its own."""
        known = {number for _, number in given}
        used = [number for event in events for number in tensor_numbers(_values(event))]
        made = frozenset(number for number in used if owns(number))
        called = [event for event in events if isinstance(event, Called)]
        made |= {number for event in called for number in event.made if owns(number)}
        outside = tuple(dict.fromkeys(number for number in used if number not in known and number not in made))
        is_closed = all(dict(event.storages).get(each, -1) >= storages for event in called for each in event.written)
        return cls(events, tuple(given), outside, made, is_closed)


def _values(event: Event) -> Any:
    return (event.result, tuple(map(TensorNumber, sum(event.handed_on, ())))) if isinstance(event, Left) else event.args


def tensor_numbers(value: Any) -> Iterator[int]:
    """Yield the numbers of the tensors in an argument."""
    if isinstance(value, TensorNumber):
        yield value.number
    elif isinstance(value, tuple):
        for item in value:
            yield from tensor_numbers(item)


@dataclass(frozen=True, eq=False)
class Repeated:
    """The rest of a call, after its begin, that was seen to be like an earlier one: it has the events of that.

    `known` and `shift` give its tensors their numbers; `kept` outlive the call, by their numbers in the earlier one.
    """

    template: RepeatedEvents
    nth_call: int
    paths: tuple[str, str]  # of the earlier module, and of this one
    modules: Mapping[str, str]  # paths of those that it has called, by those in the earlier call
    shift: int
    known: Mapping[int, int]
    memories: Mapping[int, int]
    nth_calls: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def call(self) -> tuple[str, int]:
        """The path of the module, and the number of its call."""
        return self.paths[1], self.nth_call

    def number(self, number: int) -> int:
        """Return the number of the tensor for which another one stands in the earlier call."""
        return self.known.get(number, number + self.shift if number in self.template.own else number)

    @property
    def left(self) -> Left:
        """The end of the call."""
        return cast(Left, self._copy(self.template.events[-1], iter(())))

    def events(self) -> list[Event]:
        """Return the events."""
        nth_calls = iter(self.nth_calls)
        return [self._copy(event, nth_calls) for event in self.template.events]

    def _copy(self, event: Event, nth_calls: Iterator[int]) -> Event:
        if isinstance(event, Called):
            return self._copy_function(event)
        if isinstance(event, Entered):
            args = event.args[0], self._value(event.args[1])
            return replace(event, path=self._path(event.path), nth_call=next(nth_calls), args=args)
        pairs = tuple((self.number(one), self.number(other)) for one, other in event.handed_on)
        return replace(event, result=(event.result[0], self._value(event.result[1])), handed_on=pairs)

    def _copy_function(self, event: Called) -> Called:
        number, memories = self.number, self.memories
        return Called(
            event.function,
            self._value(event.args),
            tuple([number(each) for each in event.made]),
            tuple([number(each) for each in event.written]),
            tuple([(number(each), memories.get(memory, memory)) for each, memory in event.storages]),
            event.modes,
            event.line,
            {number(one): number(other) for one, other in event.passed_on.items()} if event.passed_on else {},
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, TensorNumber):
            return TensorNumber(self.number(value.number))
        if not isinstance(value, tuple):
            return value
        if len(value) == 2 and value[0] == "module":
            return "module", self._path(value[1])
        return tuple([self._value(item) for item in value])

    def _path(self, path: str) -> str:
        return self.modules.get(path) or moved(path, *self.paths)


def moved(path: str, earlier: str, later: str) -> str:
    """Return the path of a module inside of another one for that of its counterpart in an earlier one.

    >>> moved("layers.0.norm", "layers.0", "layers.12"), moved("layers.01", "layers.0", "layers.12")
    ('layers.12.norm', 'layers.01')
    """
    inside = path == earlier or path.startswith(f"{earlier}.")
    return later + path[len(earlier) :] if inside else path


@dataclass(frozen=True)
class History:
    """One run. `inputs` are its tensor inputs, `sizes` their shapes, `state` parameters and buffers by name.

    `constants` are tensors from elsewhere. `symbols` are the tracer's for the sizes of inputs, by input and dim.
    """

    events: tuple[Event | Repeated, ...]
    inputs: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    symbols: Mapping[Any, tuple[int, int]]
    state: Mapping[str, int]
    constants: Mapping[int, Tensor]
    effects: tuple[Effect, ...] = ()

    def all_events(self) -> Iterator[Event]:
        """Yield the events, also of calls that are like earlier ones."""
        for event in self.events:
            yield from event.events() if isinstance(event, Repeated) else (event,)


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
    _named: dict[int, TensorNumber] = field(default_factory=dict)

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

    def named(self, number: int) -> TensorNumber:
        """Return the one object for a number: equal ones are mostly compared, and the same are equal at once."""
        known = self._named.get(number)
        if known is None:
            known = self._named[number] = TensorNumber(number)
        return known

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


def other_path(one: History, other: History) -> str | None:
    """Return the path of the module in which two runs begin to call other functions or modules; None if they do not."""
    opened: list[str] = []
    for event, its in itertools.zip_longest(one.all_events(), other.all_events()):
        called = [getattr(each, "function", getattr(each, "path", None)) for each in (event, its)]
        if type(event) is not type(its) or called[0] != called[1]:
            return opened[-1] if opened else ""
        if isinstance(event, Entered):
            opened.append(event.path)
        elif isinstance(event, Left):
            opened.pop()
    return None


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
