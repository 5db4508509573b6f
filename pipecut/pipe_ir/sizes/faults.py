"""Sizes for which a trace holds: its conditions, its fixed dims, and messages about calls that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy

from ...errors import warn
from ..operators import operator_name
from ..spec import Dim
from ..traced import Condition, FixedDim, Operation, TracedCall, TracedInput, TracedModel
from ..tracing.recorder import Recorder
from .dynamic import DynamicDims, Place
from .symbols import Symbols

_Sizes = Mapping[sympy.Basic, int]
_FARTHEST = 2048  # how far allowed sizes are looked for: a message has to come soon


def size_faults(call: TracedCall, given: Mapping[str, Any]) -> list[str]:
    """Describe sizes that are one in the trace and differ in this call, or that the trace does not hold for."""
    places = [
        (f"{entry.path} (dim {dim})", expected, given[entry.path].shape[dim])
        for entry in call.inputs
        for dim, expected in enumerate(entry.spec.shape if entry.spec is not None else ())
        if not isinstance(expected, int)
    ]
    first: dict[sympy.Basic, tuple[str, int]] = {}
    for place, expected, size in places:
        if isinstance(expected, sympy.Symbol):
            first.setdefault(expected, (place, size))
    sizes = {symbol: size for symbol, (_, size) in first.items()}
    unequal = [
        f"{place} has size {size}, and {_others(first, expected)}; in the trace it is {expected}, for both"
        for place, expected, size in places
        if expected.free_symbols <= sizes.keys() and int(expected.subs(sizes)) != size
    ]
    return unequal or _broken_conditions(call.conditions, sizes)


def _others(first: Mapping[sympy.Basic, tuple[str, int]], expected: sympy.Basic) -> str:
    return " and ".join(f"{first[symbol][0]} has {first[symbol][1]}" for symbol in _sorted(expected.free_symbols))


def _broken_conditions(conditions: Sequence[Condition], sizes: _Sizes) -> list[str]:
    """Describe the conditions that do not hold for these sizes.

    >>> seq = sympy.Symbol("seq", integer=True, positive=True)
    >>> conditions = [Condition(seq > 2, "model.py:7", 0), Condition(sympy.Eq(sympy.Min(64, seq), seq), "", 0)]
    >>> print(*_broken_conditions(conditions, {seq: 65}))
    seq = 65: the model's code found Min(64, seq) == seq in the example, and the trace holds for that only (allowed: \
seq from 3 to 64); for other sizes call pipeline() with an example of that size
    """
    return [_broken(condition, conditions, sizes) for condition in conditions if not _holds(condition, sizes)]


def _holds(condition: Condition, sizes: _Sizes) -> bool:
    return bool(condition.holds.subs(sizes) != sympy.false)


def _broken(condition: Condition, conditions: Sequence[Condition], sizes: _Sizes) -> str:
    symbols = _sorted(condition.holds.free_symbols)
    here = ", ".join(f"{symbol} = {sizes[symbol]}" for symbol in symbols)
    where = f" (at {condition.source})" if condition.source else ""
    allowed = _allowed_sizes(symbols[0], conditions, sizes[symbols[0]]) if len(symbols) == 1 else str(condition)
    return (
        f"{here}: the model's code found {condition} in the example{where}, and the trace holds for that only "
        f"(allowed: {allowed}); for other sizes call pipeline() with an example of that size"
    )


def _allowed_sizes(symbol: sympy.Basic, conditions: Iterable[Condition], given: int) -> str:
    """Describe the sizes for which all conditions on one size alone hold: `seq from 3 to 64`.

    >>> seq = sympy.Symbol("seq", integer=True, positive=True)
    >>> _allowed_sizes(seq, [Condition(sympy.Eq(seq % 8, 0), "", 0), Condition(seq > 8, "", 0)], 1)
    'seq = 16, 24, 32 and so on, by 8'
    """
    alone = {condition.holds: condition for condition in conditions if condition.holds.free_symbols == {symbol}}
    numbers = [int(number) for holds in alone for number in holds.atoms(sympy.Integer)]
    end = min(2 * max([32, given, *map(abs, numbers)]), _FARTHEST)
    allowed = [
        size for size in range(1, end + 1) if all(_holds(condition, {symbol: size}) for condition in alone.values())
    ]
    return f"{symbol} {_in_words(allowed, end)}"


def _in_words(allowed: Sequence[int], end: int) -> str:
    runs: list[list[int]] = []
    for size in allowed:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    gaps = {later[0] - run[0] for run, later in zip(runs, runs[1:], strict=False)}
    if len(runs) > 3 and len(gaps) == 1 and all(len(run) == 1 for run in runs):
        return f"= {', '.join(str(run[0]) for run in runs[:3])} and so on, by {gaps.pop()}"
    words = [_run_in_words(run, end) for run in runs[:4]]
    return " or ".join(words) + (" and others" if len(runs) > 4 else "") if words else "none that was found"


def _run_in_words(run: Sequence[int], end: int) -> str:
    if run[-1] == end:
        return f"from {run[0]} on"
    return f"= {run[0]}" if len(run) == 1 else f"from {run[0]} to {run[-1]}"


def _sorted(symbols: Iterable[sympy.Basic]) -> list[sympy.Basic]:
    return sorted(symbols, key=str)


def find_fixed_dims(
    run: Recorder, asked: DynamicDims, inputs: Sequence[TracedInput], values: Sequence[int]
) -> tuple[FixedDim, ...]:
    """Return the dims of inputs that began as symbols, and that the code has tied to a number or another size."""
    by_value = {entry.value: entry for entry in inputs}
    lines = {
        (nth, dim): _line(run, expr)
        for nth, sizes in enumerate(run.decisions.input_sizes)
        for dim, expr in enumerate(sizes)
        if isinstance(expr, sympy.Symbol)
    }
    found = []
    for nth, dim in sorted({*lines, *asked.asked}):
        entry, name, line = by_value[values[nth]], asked.asked.get((nth, dim)), lines.get((nth, dim), "")
        assert entry.spec is not None
        size, wanted = entry.spec.shape[dim], (nth, dim) in asked.asked
        fixed = isinstance(size, int) and (wanted or line != "" or dim == 0)
        if fixed or (name is not None and str(size) != name):
            source = line or _line_of_name(name, lines, asked.names)
            as_number = _is_taken_as_number(run, (nth, dim))
            found.append(FixedDim(entry.path, dim, name, size, source, wanted, as_number))
    return tuple(found)


def _is_taken_as_number(run: Recorder, place: Place) -> bool:
    """Return True if the code asked for the plain number of a size, or of one that it is tied to."""
    symbol = run.decisions.input_sizes[place[0]][place[1]]
    tied = {symbol}
    while symbol in run.decisions.replaced:
        symbol, _ = run.decisions.replaced[symbol]
        tied.add(symbol)
    numbers = [expr for expr, _ in run.decisions.made if not _is_statement(expr)]
    return any(expr.free_symbols & tied for expr in numbers)


def _line(run: Recorder, symbol: sympy.Basic) -> str:
    """Return the line that replaced a symbol, or the symbol that replaced it."""
    line = ""
    while symbol in run.decisions.replaced:
        symbol, line = run.decisions.replaced[symbol]
    return line


def _line_of_name(name: str | None, lines: Mapping[Place, str], names: Mapping[Place, str]) -> str:
    """Return the line that replaced another dim of this name."""
    found = [line for place, line in lines.items() if line and name is not None and names.get(place) == name]
    return found[0] if found else ""


def warn_of_fixed_dims(traced: TracedModel) -> None:
    """Warn once of all sizes that the user wants symbolic and that are not; the batch is always wanted."""
    fixed = [fixed for fixed in traced.fixed_dims if fixed.asked]
    firsts = [size for entry in traced.inputs if entry.spec is not None for size in entry.spec.shape[:1]]
    has_batch = any(not isinstance(size, int) for size in firsts)
    if not has_batch and not any(entry.dim == 0 for entry in fixed):
        fixed = [entry for entry in traced.fixed_dims if entry.dim == 0][:1] + fixed
    by_size: dict[tuple[str | int, Dim], list[FixedDim]] = {}
    for entry in fixed:
        by_size.setdefault((entry.name or f"{entry.path}, dim {entry.dim}", entry.size), []).append(entry)
    if by_size:
        what = "\n".join(_describe(entries) for entries in by_size.values())
        message = f"the trace of {type(traced.model).__name__} holds for some sizes only:\n{what}"
        warn(message)


def _describe(entries: Sequence[FixedDim]) -> str:
    first = entries[0]
    places = " and ".join(f"dim {entry.dim} of {entry.path}" for entry in entries)
    subject = f"{first.name} ({places})" if first.name else places
    why = f"fixed at {first.source}" if first.source else "fixed by the model's code"
    if isinstance(first.size, int):
        return f"  {subject} is always {first.size}: {why}"
    return f"  {subject} is always {first.size}: {why}. If they may differ, trace with an example in which they do"


def find_conditions(
    run: Recorder, symbols: Symbols, operations: Sequence[Operation], span_ticks: Mapping[int, tuple[int, int]]
) -> tuple[Condition, ...]:
    """Return the decisions of the code about sizes, and the conditions of operations that treat a size of 1 apart."""
    decided = [
        Condition(holds, run.decisions.lines[expr, answer, id(span)], span_ticks[id(span)][0])
        for (expr, answer), spans in run.decisions.made.items()
        for holds in [_condition_in_words(symbols, expr, answer)]
        if holds is not None
        for span in spans.values()
    ]
    squeezed = [
        Condition(sympy.Ne(dim, 1), op.source, op.tick)
        for op in operations
        if operator_name(op.target) == "aten::squeeze"
        for dim in _squeezed_dims(operations, op)
    ]
    return (*decided, *squeezed)


def _condition_in_words(symbols: Symbols, expr: sympy.Basic, answer: Any) -> sympy.Basic | None:
    """Return a decision in the names of the dims; None if it holds for all sizes, or depends on data."""
    holds = (expr if answer else sympy.Not(expr)) if _is_statement(expr) else sympy.Eq(expr, answer)
    renamed = symbols.renamed(holds)
    return None if renamed == sympy.true else renamed


def _is_statement(expr: sympy.Basic) -> bool:
    """Return True for what is true or false; to sympy a symbol may be that too, and here it is a number."""
    return isinstance(expr, sympy.logic.boolalg.Boolean) and not isinstance(expr, sympy.Symbol)


def _squeezed_dims(operations: Sequence[Operation], op: Operation) -> list[sympy.Basic]:
    """Return the symbolic dims that a squeeze would drop at size 1, and the trace has kept."""
    spec = operations[op.refs[0]].spec
    shape = spec.shape if spec is not None else ()
    if len(op.args) > 1:
        dims = op.args[1] if isinstance(op.args[1], list | tuple) else [op.args[1]]
        shape = tuple(shape[dim] for dim in dims)
    return [dim for dim in shape if isinstance(dim, sympy.Basic)]


_OTHERS: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n, lambda n: n + 2, lambda n: 3 * n)


def other_sizes(traced: TracedModel, shapes: Sequence[Sequence[int]]) -> Iterator[tuple[list[list[int]], str]]:
    """Yield other shapes of the inputs for which the trace holds, and the sizes in words."""
    entries = {entry.value: entry.spec for entry in traced.inputs if entry.value is not None}
    order = sorted(entries)  # the inputs come in the order of the call
    sizes = {symbol: shapes[order.index(value)][dim] for symbol, (value, dim) in traced.dims.items()}
    for other in _OTHERS if sizes else ():
        new = {symbol: other(size) for symbol, size in sizes.items()}
        if all(condition.holds.subs(new) != sympy.false for condition in traced.conditions):
            text = ", ".join(f"{symbol} = {new[symbol]} instead of {size}" for symbol, size in sizes.items())
            specs = [entries[value] for value in order]
            yield [[int(sympy.sympify(dim).subs(new)) for dim in spec.shape] for spec in specs if spec], text
