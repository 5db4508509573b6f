"""Value numbers of the tensors of a run: what generated code computes, in terms of inputs, state and whole calls.

Equal numbers were computed by the same functions with the same plain arguments from the same values.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor

from ..pipe_ir import (
    Called,
    Entered,
    Event,
    History,
    Left,
    Repeated,
    RepeatedEvents,
    SizeExpression,
    TensorNumber,
    tensor_numbers,
)
from ..torch_internals import is_overload

Call: TypeAlias = tuple[str, int]  # the path of a module, and the number of its call


class ValueTable:
    """Value numbers: each different description gets the next one. `changing` depend on inputs or random numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._constants: list[tuple[Tensor, int]] = []
        self.changing: set[int] = set()

    def number(self, description: Any, changing: bool = False) -> int:
        found = self._numbers.setdefault(description, len(self._numbers))
        if changing:
            self.changing.add(found)
        return found

    def knows(self, description: Any) -> bool:
        return description in self._numbers

    def constant(self, tensor: Tensor) -> int:
        """Return the number of a tensor from elsewhere: the same for the same tensor, or for one that is equal."""
        for known, number in self._constants:
            if known is tensor or _is_equal(known, tensor):
                return number
        number = self.number(("constant", len(self._constants)))
        self._constants.append((tensor, number))
        return number


def _is_equal(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    if not alike or one.is_meta or one.layout != torch.strided:
        return False
    with torch.no_grad():
        return bool(torch.equal(one, other))


class PlainSizes:
    """Sizes of a trace as plain numbers, for a run in which the inputs have given shapes."""

    def __init__(self, history: History, shapes: Sequence[Sequence[int]]) -> None:
        self._sizes = {symbol: shapes[nth][dim] for symbol, (nth, dim) in history.symbols.items()} if shapes else {}
        self._known: dict[Any, Any] = {}

    def __call__(self, expr: Any) -> Any:
        key = type(expr), expr  # 1 and True are equal, and have one hash
        if key not in self._known:
            self._known[key] = self._evaluate(expr)
        return self._known[key]

    def _evaluate(self, expr: Any) -> Any:
        value = expr.xreplace(self._sizes) if hasattr(expr, "xreplace") else expr
        if getattr(value, "free_symbols", ()):
            return ("a number that depends on data",)
        if isinstance(value, bool | sympy.logic.boolalg.BooleanAtom):
            return ("bool", bool(value))
        return int(value) if getattr(value, "is_integer", isinstance(value, int)) else ("float", f"{float(value):.15g}")


@dataclass(frozen=True)
class Step:
    """A step of generated code: the call of a function or of a whole module."""

    number: int
    call: Call
    event: Called | Entered
    args: Any


@dataclass(frozen=True)
class Reading:
    """All that generated code does in a run: its steps, and what comes of them."""

    items: tuple[Step, ...]
    result: Any
    state: Mapping[str, int]
    calls: Mapping[int, int]  # of whole modules whose arguments change from call to call


@dataclass
class _Run:
    """A run that is being read: its steps so far, and the calls that are open, each with its number if it is whole."""

    history: History
    sizes: PlainSizes
    with_gradients: bool
    items: list[Step] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)
    open_calls: list[tuple[Call, int | None]] = field(default_factory=list)
    result: Any = ()

    @property
    def is_inside_whole(self) -> bool:
        return bool(self.open_calls) and self.open_calls[-1][1] is not None


@dataclass
class HistoryReader:
    """Reads histories of runs in a row; what one leaves behind is known in the next."""

    table: ValueTable
    whole: Collection[Call]
    closed: Collection[Call] = ()  # calls like earlier ones that are steps of their own
    numbers: dict[int, int] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    writes: dict[int, tuple[int, int]] = field(default_factory=dict)  # to storages: the last one, and when it was
    born: dict[int, int] = field(default_factory=dict)  # when tensors were made; a write after that has changed them
    clock: int = 0

    def read(self, history: History, sizes: PlainSizes, with_gradients: bool) -> Reading:
        """Return what generated code does in a run; the gradient mode counts only if `with_gradients`."""
        self._begin(history)
        run = _Run(history, sizes, with_gradients)
        for event in history.events:
            if not isinstance(event, Repeated):
                self._read(event, run)
            elif run.is_inside_whole or event.call in self.closed:
                self._read_repeated(event, run)
            else:
                for each in event.events():
                    self._read(each, run)
        state = {name: self._tensor(number, history) for name, number in history.state.items()}
        return Reading(tuple(run.items), run.result, state, +run.calls)

    def _read(self, event: Event, run: _Run) -> None:
        self.clock += 1
        if isinstance(event, Entered):
            self._enter(event, run)
        elif isinstance(event, Left):
            _, number = run.open_calls.pop()
            if number == -1:
                return
            if number is None:
                run.result = self.value(event.result, run.history, run.sizes)
            self.leave(event, run.history, number)
        elif not run.is_inside_whole:
            around = run.open_calls[-1][0]
            run.items.append(self.function(event, around, run.history, run.sizes, run.with_gradients))

    def _enter(self, event: Entered, run: _Run) -> None:
        if run.is_inside_whole:
            run.open_calls.append((run.open_calls[-1][0], -1))
            return
        call, number = (event.path, event.nth_call), None
        if call in self.whole:
            args = self.value(event.args, run.history, run.sizes)
            number = self._number(("call", event.path, args))
            run.items.append(Step(number, run.open_calls[-1][0], event, args))
            run.calls[number] += number in self.table.changing
        run.open_calls.append((call, number))

    def _read_repeated(self, event: Repeated, run: _Run) -> None:
        """Read a call that is like an earlier one as a whole: what comes of it follows from what it uses."""
        self.clock += 1
        call, number = run.open_calls.pop()
        if number == -1:
            return
        is_step = number is None
        if number is None:
            used = (event.number(each) for each in (*dict(event.template.given).values(), *event.template.outside))
            values = tuple(ValueNumber(self._tensor(each, run.history)) for each in used)
            number = self._number(("repeated", call, values), changing=_draws(event.template))
            run.items.append(Step(number, call, Entered(*call, (), None), values))
        self.leave(event.left, run.history, number)
        for position, kept in enumerate(event.kept if is_step else ()):
            if self.numbers.get(event.number(kept)) is None:
                made = self.table.number(("kept", number, position), number in self.table.changing)
                self._note(event.number(kept), made)

    def _begin(self, history: History) -> None:
        """Age what earlier runs have left: what depends on their inputs is not what a trace computes anew."""
        for tensor, number in self.numbers.items():
            if number in self.table.changing:
                self.numbers[tensor] = self.table.number(("earlier", number), changing=True)
        for position, tensor in enumerate(history.inputs):
            self.numbers[tensor] = self.table.number(("input", position), changing=True)
        for name, tensor in reversed(list(history.state.items())):
            self.numbers[tensor] = self.table.number(("state", name))
            self.writes.pop(self.storages.get(tensor, -1), None)

    def function(self, event: Called, call: Call, history: History, sizes: PlainSizes, with_gradients: bool) -> Step:
        """Return the step that the call of a function is, and note what it makes and writes to."""
        self.storages.update(event.storages)
        args = self.value(event.args, history, sizes)
        modes = event.modes if with_gradients else event.modes[1:]
        number = self._number((event.function, args, modes), changing=_is_random(event.function))
        used = set(tensor_numbers(event.args))
        for position, made in enumerate(event.made):
            result = ("result", number, position)
            if made in event.passed_on and not self.table.knows(result):
                self._note(made, self._tensor(event.passed_on[made], history))  # in the trace it is the argument
            elif made not in used:
                self._note(made, self.table.number(result, number in self.table.changing))
        for written in event.written:
            self.writes[self.storages[written]] = self.clock, number
        return Step(number, call, event, args)

    def leave(self, event: Left, history: History, number: int | None) -> None:
        """Note the results of a call; `number` is that of one that is a step of its own."""
        for position, (own, handed_on) in enumerate(event.handed_on):
            if number is not None:
                self._note(handed_on, self.table.number(("result", number, position), number in self.table.changing))
            elif own != handed_on:
                self._note(handed_on, self._tensor(own, history))

    def _note(self, tensor: int, number: int) -> None:
        self.numbers[tensor], self.born[tensor] = number, self.clock

    def _number(self, description: Any, changing: bool = False) -> int:
        return self.table.number(description, changing or any(map(self._changes, _value_numbers(description))))

    def _changes(self, number: int) -> bool:
        return number in self.table.changing

    def _tensor(self, tensor: int, history: History) -> int:
        number = self.numbers.get(tensor)
        if number is None:
            known = history.constants.get(tensor)
            number = self.table.number("made unseen") if known is None else self.table.constant(known)
            self.numbers[tensor] = number
        when, written = self.writes.get(self.storages.get(tensor, -1), (-1, -1))
        if when <= self.born.get(tensor, -1):
            return number
        return self._number(("written", ValueNumber(number), ValueNumber(written)))

    def value(self, value: Any, history: History, sizes: PlainSizes) -> Any:
        """Return an argument with value numbers for tensors, and numbers for sizes."""
        if isinstance(value, TensorNumber):
            return ValueNumber(self._tensor(value.number, history))
        if isinstance(value, SizeExpression):
            return sizes(value.expr)
        if isinstance(value, tuple):
            return tuple([self.value(item, history, sizes) for item in value])
        return value


@dataclass(frozen=True)
class ValueNumber:
    """A tensor among arguments, by its value number."""

    number: int


def _value_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, ValueNumber):
        yield value.number
    elif isinstance(value, tuple):
        for item in value:
            yield from _value_numbers(item)


@functools.lru_cache(maxsize=64)
def _draws(template: RepeatedEvents) -> bool:
    return any(isinstance(event, Called) and _is_random(event.function) for event in template.events)


@functools.cache
def _is_random(function: Any) -> bool:
    """Return True for a function that draws random numbers; operators say so, functions have the name of one."""
    name = getattr(function, "__name__", "")
    packet = None if is_overload(function) else getattr(torch.ops.aten, name, None)
    overloads = [function] if is_overload(function) else [getattr(packet, each) for each in _overloads(packet)]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _overloads(packet: Any) -> Sequence[str]:
    return packet.overloads() if hasattr(packet, "overloads") else ()
