"""Whether the sizes of a call are among those that a trace stands for, and what is allowed if not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from .traced import Condition, TracedCall

Sizes = Mapping[sympy.Basic, int]
_FARTHEST = 2048  # how far allowed sizes are looked for: a message has to come soon


def size_faults(call: TracedCall, given: Mapping[str, Any]) -> list[str]:
    """Sizes that are one in the trace and differ in this call, or sizes that the trace does not hold for."""
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
    return unequal or broken_conditions(call.conditions, sizes)


def _others(first: Mapping[sympy.Basic, tuple[str, int]], expected: sympy.Basic) -> str:
    return " and ".join(f"{first[symbol][0]} has {first[symbol][1]}" for symbol in _sorted(expected.free_symbols))


def broken_conditions(conditions: Sequence[Condition], sizes: Sizes) -> list[str]:
    """The conditions that do not hold for these sizes, in words.

    >>> seq = sympy.Symbol("seq", integer=True, positive=True)
    >>> conditions = [Condition(seq > 2, "model.py:7", 0), Condition(sympy.Eq(sympy.Min(64, seq), seq), "", 0)]
    >>> print(*broken_conditions(conditions, {seq: 65}))
    seq = 65: the model's code found Min(64, seq) == seq in the example, and the trace holds for that only (allowed: \
seq from 3 to 64); for other sizes call pipeline() with an example of that size
    """
    return [_broken(condition, conditions, sizes) for condition in conditions if not _holds(condition, sizes)]


def _holds(condition: Condition, sizes: Sizes) -> bool:
    return bool(condition.holds.subs(sizes) != sympy.false)


def _broken(condition: Condition, conditions: Sequence[Condition], sizes: Sizes) -> str:
    symbols = _sorted(condition.holds.free_symbols)
    here = ", ".join(f"{symbol} = {sizes[symbol]}" for symbol in symbols)
    where = f" (at {condition.source})" if condition.source else ""
    allowed = allowed_sizes(symbols[0], conditions, sizes[symbols[0]]) if len(symbols) == 1 else str(condition)
    return (
        f"{here}: the model's code found {condition} in the example{where}, and the trace holds for that only "
        f"(allowed: {allowed}); for other sizes call pipeline() with an example of that size"
    )


def allowed_sizes(symbol: sympy.Basic, conditions: Iterable[Condition], given: int) -> str:
    """The sizes for which all conditions on one size alone hold: `seq from 3 to 64`.

    >>> seq = sympy.Symbol("seq", integer=True, positive=True)
    >>> allowed_sizes(seq, [Condition(sympy.Eq(seq % 8, 0), "", 0), Condition(seq > 8, "", 0)], 1)
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
    steps = {later[0] - run[0] for run, later in zip(runs, runs[1:], strict=False)}
    if len(runs) > 3 and len(steps) == 1 and all(len(run) == 1 for run in runs):
        return f"= {', '.join(str(run[0]) for run in runs[:3])} and so on, by {steps.pop()}"
    words = [_run_in_words(run, end) for run in runs[:4]]
    return " or ".join(words) + (" and others" if len(runs) > 4 else "") if words else "none that was found"


def _run_in_words(run: Sequence[int], end: int) -> str:
    if run[-1] == end:
        return f"from {run[0]} on"
    return f"= {run[0]}" if len(run) == 1 else f"from {run[0]} to {run[-1]}"


def _sorted(symbols: Iterable[sympy.Basic]) -> list[sympy.Basic]:
    return sorted(symbols, key=str)
