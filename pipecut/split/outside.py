"""Comparison of a trace with other runs of its model: decisions and values that come from outside of the trace.

Only modules that a cut goes through run as generated code, and can differ from what the model does. In each run every
tensor gets a value number: equal numbers were computed by the same functions with the same plain arguments from the
same inputs, parameters and results of whole modules. A run that returns, and passes to modules, the numbers of the
trace does the same, even if it takes some of them from a cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..pipe_ir import Called, Entered, History, Line, Repeated, Replay, TracedModel, is_check, line_text, operator_name
from ..torch_internals import is_overload
from .program import Piece, WholeCall, walk
from .value_numbers import Call, HistoryReader, PlainSizes, Reading, Step, ValueNumber, ValueTable


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
    reader = HistoryReader(ValueTable(), whole, _repeated(history).keys())
    items = reader.read(history, PlainSizes(history, history.sizes), with_gradients=True).items
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
    # Calls that are like earlier ones in both runs need no look inside, unless something differs.
    if _first_difference(traced.history, whole, replays, opens_repeated=False) is None:
        return None
    return _first_difference(traced.history, whole, replays, opens_repeated=True)


def _first_difference(
    traced: History, whole: Collection[Call], replays: Sequence[Replay], *, opens_repeated: bool
) -> _Difference | None:
    table = ValueTable()
    again = HistoryReader(table, whole)
    for replay in replays:
        numbers, own_numbers = PlainSizes(traced, replay.history.sizes), PlainSizes(replay.history, ())
        once = HistoryReader(table, whole)
        if not opens_repeated:
            pair = _Pair((traced, numbers), (replay.history, own_numbers), replay.with_gradients)
            once.closed = again.closed = pair.alike_calls()
        expected = once.read(traced, numbers, replay.with_gradients)
        found = again.read(replay.history, own_numbers, replay.with_gradients)
        difference = _compare(expected, found, replay)
        if difference is not None:
            return difference
    return None


def _repeated(history: History) -> dict[Call, Repeated]:
    """Return the calls that are like earlier ones, and change nothing but their own tensors."""
    found = (event for event in history.events if isinstance(event, Repeated))
    return {event.call: event for event in found if event.template.is_closed}


class _Pair:
    """Two runs, to compare calls that are like earlier ones in both: by what those earlier ones do to what is given."""

    def __init__(
        self, one: tuple[History, PlainSizes], other: tuple[History, PlainSizes], with_gradients: bool
    ) -> None:
        self._runs, self._with_gradients = (one, other), with_gradients
        self._table = ValueTable()
        self._same: dict[tuple[int, int], tuple[dict[int, int], dict[int, int]] | None] = {}

    def alike_calls(self) -> set[Call]:
        """Return the calls that do the same in both runs if they are given the same."""
        first, second = (_repeated(history) for history, _ in self._runs)
        return {call for call in first.keys() & second.keys() if self._is_alike(first[call], second[call])}

    def _is_alike(self, one: Repeated, other: Repeated) -> bool:
        key = id(one.template), id(other.template)
        if key not in self._same:
            steps, values = zip(*map(self._steps, (one, other), self._runs), strict=True)
            self._same[key] = values if steps[0] == steps[1] else None
        values_of = self._same[key]
        if values_of is None:
            return False
        kept = [[values.get(each) for each in call.kept] for values, call in zip(values_of, (one, other), strict=True)]
        same_modules = sorted(one.modules.values()) == sorted(other.modules.values())
        return same_modules and kept[0] == kept[1] and None not in kept[0]

    def _steps(self, call: Repeated, run: tuple[History, PlainSizes]) -> tuple[list[Any], dict[int, int]]:
        """Return all that the earlier call does, and the values of its tensors, in terms of what it is given."""
        template, (history, sizes) = call.template, run
        reader = HistoryReader(self._table, ())
        for place, number in (*enumerate(template.outside), *reversed(template.given)):
            label = "outside" if number in template.outside else "given"
            reader.numbers[number] = self._table.number((label, place))
        steps: list[Any] = [[label for label, _ in template.given], len(template.outside)]
        for event in template.events:
            reader.clock += 1
            if isinstance(event, Called):
                item = reader.function(event, call.call, history, sizes, self._with_gradients)
                steps.append((item.number, event.written != ()))
            elif isinstance(event, Entered):
                steps.append((event.path.removeprefix(call.paths[0]), reader.value(event.args, history, sizes)))
            else:
                steps.append(reader.value(event.result, history, sizes))
                reader.leave(event, history, None)
        return steps, reader.numbers


# The first step that differs, in words.


def _compare(expected: Reading, found: Reading, replay: Replay) -> _Difference | None:
    same_steps = [item.number for item in expected.items] == [item.number for item in found.items]
    if replay.error is None and (same_steps or _outcome(expected) == _outcome(found)):
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


def _outcome(reading: Reading) -> tuple[Any, ...]:
    """Return what comes of the steps of a run: its results, and the conditions that it checks, whatever they say."""
    checks = [item.args[0][:2] for item in reading.items if is_check(getattr(item.event, "function", None))]
    return reading.result, reading.state, reading.calls, checks


def _describe(item: Step | None, other: Step | None) -> str:
    if item is None:
        return "does nothing more"
    if isinstance(item.event, Entered):
        return f"calls {item.event.path!r}{_values(item, other)}"
    return f"calls {_name(item.event.function)}{_values(item, other)}"


def _values(item: Step, other: Step | None) -> str:
    """Return the plain arguments that differ from those of the other step, if it is a call of the same."""
    if other is None or _what(item) != _what(other):
        return ""
    mine, theirs = list(_plain(item.args)), list(_plain(other.args))
    different = [mine[at] for at in range(len(mine)) if at >= len(theirs) or mine[at] != theirs[at]]
    return f" with {', '.join(map(_text, different))}" if different else " with another tensor"


def _what(item: Step) -> Any:
    return item.event.path if isinstance(item.event, Entered) else item.event.function


def _plain(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple) and not (len(value) == 2 and isinstance(value[0], str)):
        for item in value:
            yield from _plain(item)
    else:
        yield value


def _text(value: Any) -> str:
    if isinstance(value, ValueNumber):
        return "a tensor"
    return str(value[1]) if isinstance(value, tuple) and len(value) == 2 else str(value)


def _name(function: Any) -> str:
    name = operator_name(function) if is_overload(function) else getattr(function, "__name__", str(function))
    return name if isinstance(name, str) else str(name)
