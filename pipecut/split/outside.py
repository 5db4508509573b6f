"""Comparison of a trace with other runs of its model: decisions and values that come from outside of the trace.

Only modules that a cut goes through run as generated code, and can differ from what the model does. In each run every
tensor gets a value number: equal numbers were computed by the same functions with the same plain arguments from the
same inputs, parameters and results of whole modules. A run that returns, and passes to modules, the numbers of the
trace does the same, even if it takes some of them from a cache.
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
    History,
    Left,
    Line,
    Replay,
    SizeExpression,
    TensorNumber,
    TracedModel,
    line_text,
    operator_name,
)
from ..torch_internals import is_overload
from .program import Piece, WholeCall, walk

Call: TypeAlias = tuple[str, int]  # the path of a module, and the number of its call


@dataclass(frozen=True)
class _Difference:
    """A place in the forward of a module at which another run did something else than the trace."""

    path: str
    how: str
    traced: str
    again: str
    line: Line | None
    needs_gradients: bool = False  # it shows under torch.no_grad() only
    also: str = ""  # the module in which the other run was there: either may have done more, or less

    def __str__(self) -> str:
        place = f" at {line_text(self.line)}" if self.line is not None else ""
        return f"in the trace it {self.traced}, and when run again {self.how} it {self.again}{place}"


@dataclass(frozen=True)
class _ConstantWrite:
    """A write of generated code to a tensor that is neither an input nor a parameter or buffer."""

    path: str
    line: Line | None


def constant_writes(traced: TracedModel, whole: Collection[Call]) -> Iterator[_ConstantWrite]:
    """Yield the writes outside of whole calls to tensors that no stage keeps."""
    history = traced.history
    assert history is not None
    reader = _Reader(_Table(), whole)
    items = reader.read(history, _Numbers(history, history.sizes), with_gradients=True).items
    outside = {reader.storages[tensor] for tensor in history.constants if tensor in reader.storages}
    for item in items:
        if isinstance(item.event, Called) and any(reader.storages[each] in outside for each in item.event.written):
            yield _ConstantWrite(item.call[0], item.event.line)


def whole_calls(programs: Sequence[Piece]) -> set[Call]:
    """Return the calls of modules that run their own code."""
    items = (item for program in programs for item in walk(program.items))
    return {(item.span.path, item.span.nth_call) for item in items if isinstance(item, WholeCall)}


def find_difference(traced: TracedModel, whole: Collection[Call], replays: Sequence[Replay]) -> _Difference | None:
    """Return the first thing outside of whole calls that other runs of the model do not do as the trace."""
    assert traced.history is not None
    table = _Table()
    again = _Reader(table, whole)
    for replay in replays:
        numbers = _Numbers(traced.history, replay.history.sizes)
        expected = _Reader(table, whole).read(traced.history, numbers, replay.with_gradients)
        found = again.read(replay.history, _Numbers(replay.history, ()), replay.with_gradients)
        difference = _compare(expected, found, replay)
        if difference is not None:
            return difference
    return None


class _Table:
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


class _Numbers:
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
class _Item:
    """A step of generated code: the call of a function or of a whole module."""

    number: int
    call: Call
    event: Called | Entered
    args: Any


@dataclass(frozen=True)
class _Reading:
    """All that generated code does in a run: its steps, and what comes of them."""

    items: tuple[_Item, ...]
    result: Any
    state: Mapping[str, int]
    calls: Mapping[int, int]  # of whole modules whose arguments change from call to call


@dataclass
class _Reader:
    """Reads histories of runs in a row; what one leaves behind is known in the next."""

    table: _Table
    whole: Collection[Call]
    numbers: dict[int, int] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    writes: dict[int, tuple[int, int]] = field(default_factory=dict)  # to storages: the last one, and when it was
    born: dict[int, int] = field(default_factory=dict)  # when tensors were made; a write after that has changed them
    clock: int = 0

    def read(self, history: History, sizes: _Numbers, with_gradients: bool) -> _Reading:
        """Return what generated code does in a run; the gradient mode counts only if `with_gradients`."""
        self._begin(history)
        items: list[_Item] = []
        calls: Counter[int] = Counter()
        open_calls: list[tuple[Call, int | None]] = []
        result: Any = ()
        for event in history.events:
            self.clock += 1
            inside_whole = bool(open_calls) and open_calls[-1][1] is not None
            if isinstance(event, Entered):
                if inside_whole:
                    open_calls.append((open_calls[-1][0], -1))
                    continue
                call = (event.path, event.nth_call)
                number = None
                if call in self.whole:
                    args = self._value(event.args, history, sizes)
                    number = self._number(("call", event.path, args))
                    items.append(_Item(number, open_calls[-1][0], event, args))
                    calls[number] += number in self.table.changing
                open_calls.append((call, number))
            elif isinstance(event, Left):
                _, number = open_calls.pop()
                if number == -1:
                    continue
                if number is None:
                    result = self._value(event.result, history, sizes)
                self._leave(event, history, number)
            elif not inside_whole:
                items.append(self._function(event, open_calls[-1][0], history, sizes, with_gradients))
        state = {name: self._tensor(number, history) for name, number in history.state.items()}
        return _Reading(tuple(items), result, state, +calls)

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

    def _function(self, event: Called, call: Call, history: History, sizes: _Numbers, with_gradients: bool) -> _Item:
        self.storages.update(event.storages)
        args = self._value(event.args, history, sizes)
        modes = event.modes if with_gradients else event.modes[1:]
        number = self._number((event.function, args, modes), changing=_is_random(event.function))
        used = set(_tensor_numbers(event.args))
        for position, made in enumerate(event.made):
            result = ("result", number, position)
            if made in event.passed_on and not self.table.knows(result):
                self._note(made, self._tensor(event.passed_on[made], history))  # in the trace it is the argument
            elif made not in used:
                self._note(made, self.table.number(result, number in self.table.changing))
        for written in event.written:
            self.writes[self.storages[written]] = self.clock, number
        return _Item(number, call, event, args)

    def _leave(self, event: Left, history: History, number: int | None) -> None:
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
        return self._number(("written", _Value(number), _Value(written)))

    def _value(self, value: Any, history: History, sizes: _Numbers) -> Any:
        """Return an argument with value numbers for tensors, and numbers for sizes."""
        if isinstance(value, TensorNumber):
            return _Value(self._tensor(value.number, history))
        if isinstance(value, SizeExpression):
            return sizes(value.expr)
        if isinstance(value, tuple):
            return tuple([self._value(item, history, sizes) for item in value])
        return value


@dataclass(frozen=True)
class _Value:
    """A tensor among arguments, by its value number."""

    number: int


def _value_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, _Value):
        yield value.number
    elif isinstance(value, tuple):
        for item in value:
            yield from _value_numbers(item)


def _tensor_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, TensorNumber):
        yield value.number
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensor_numbers(item)


@functools.cache
def _is_random(function: Any) -> bool:
    """Return True for a function that draws random numbers; operators say so, functions have the name of one."""
    name = getattr(function, "__name__", "")
    packet = None if is_overload(function) else getattr(torch.ops.aten, name, None)
    overloads = [function] if is_overload(function) else [getattr(packet, each) for each in _overloads(packet)]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _overloads(packet: Any) -> Sequence[str]:
    return packet.overloads() if hasattr(packet, "overloads") else ()


# The first step that differs, in words.


def _compare(expected: _Reading, found: _Reading, replay: Replay) -> _Difference | None:
    same_steps = [item.number for item in expected.items] == [item.number for item in found.items]
    if replay.error is None:
        same_outcome = (expected.result, expected.state, expected.calls) == (found.result, found.state, found.calls)
        if same_steps or same_outcome:
            return None
    position = next(
        (
            at
            for at, (one, other) in enumerate(zip(expected.items, found.items, strict=False))
            if one.number != other.number
        ),
        min(len(expected.items), len(found.items)),
    )
    one = expected.items[position] if position < len(expected.items) else None
    other = found.items[position] if position < len(found.items) else None
    place = one or other
    again = f"raises {replay.error}" if replay.error is not None and other is None else _describe(other, one)
    return _Difference(
        place.call[0] if place is not None else "",
        replay.how,
        _describe(one, other),
        again,
        place.event.line if place is not None else None,
        not replay.with_gradients,
        other.call[0] if other is not None else "",
    )


def _describe(item: _Item | None, other: _Item | None) -> str:
    if item is None:
        return "does nothing more"
    if isinstance(item.event, Entered):
        return f"calls {item.event.path!r}{_values(item, other)}"
    return f"calls {_name(item.event.function)}{_values(item, other)}"


def _values(item: _Item, other: _Item | None) -> str:
    """Return the plain arguments that differ from those of the other step, if it is a call of the same."""
    if other is None or _what(item) != _what(other):
        return ""
    mine, theirs = list(_plain(item.args)), list(_plain(other.args))
    different = [mine[at] for at in range(len(mine)) if at >= len(theirs) or mine[at] != theirs[at]]
    return f" with {', '.join(map(_text, different))}" if different else " with another tensor"


def _what(item: _Item) -> Any:
    return item.event.path if isinstance(item.event, Entered) else item.event.function


def _plain(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple) and not (len(value) == 2 and isinstance(value[0], str)):
        for item in value:
            yield from _plain(item)
    else:
        yield value


def _text(value: Any) -> str:
    if isinstance(value, _Value):
        return "a tensor"
    return str(value[1]) if isinstance(value, tuple) and len(value) == 2 else str(value)


def _name(function: Any) -> str:
    name = operator_name(function) if is_overload(function) else getattr(function, "__name__", str(function))
    return name if isinstance(name, str) else str(name)
