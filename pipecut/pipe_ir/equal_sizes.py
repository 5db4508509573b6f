"""Sizes that are equal by what the model's code has decided, where torch does not draw the conclusion.

Of `batch*seq == rows*seq` torch keeps the equation, and of `seq <= length`, `length <= seq` both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import sympy

Resolve = Callable[[Any], Any]
Decision = tuple[sympy.Basic, Any]  # what was asked, and the answer


def implied_equalities(decisions: Iterable[Decision], resolved: Resolve) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """Pairs of symbols that stand for one size."""
    at_most: set[sympy.Basic] = set()
    for decision in decisions:
        for difference, is_equation in _differences(decision, resolved):
            if is_equation or -difference in at_most:
                yield from _solved(difference)
            at_most.add(difference)


def related(
    symbol: sympy.Symbol, others: Iterable[sympy.Symbol], decisions: Iterable[Decision], resolved: Resolve
) -> sympy.Symbol | None:
    """The first of the other symbols that the code has compared this one with."""
    compared = [
        difference.free_symbols
        for decision in decisions
        for difference, is_equation in _differences(decision, resolved)
        if symbol in difference.free_symbols and (is_equation or len(difference.free_symbols) == 2)
    ]
    return next((other for other in others if any(other in symbols for symbols in compared)), None)


def _differences(decision: Decision, resolved: Resolve) -> Iterator[tuple[sympy.Basic, bool]]:
    """A decision as `difference <= 0`, or `difference == 0`; nothing for what says neither."""
    expr, answer = decision
    if not isinstance(expr, sympy.core.relational.Relational):
        return
    held = expr if answer else sympy.Not(expr)
    if not isinstance(held, sympy.core.relational.Relational):
        return
    write = _FORMS.get(type(held))
    if write is not None:
        difference = sympy.expand(write(resolved(held.lhs), resolved(held.rhs)))
        yield difference, isinstance(held, sympy.Eq)


_FORMS: Mapping[type, Callable[[Any, Any], Any]] = {
    sympy.Eq: lambda lhs, rhs: lhs - rhs,
    sympy.Le: lambda lhs, rhs: lhs - rhs,
    sympy.Ge: lambda lhs, rhs: rhs - lhs,
}


def _solved(difference: sympy.Basic) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """The two symbols, if the equation says no more than that they are equal: `a - b`, or `a*c - b*c`."""
    terms = sympy.Add.make_args(difference)
    if len(terms) != 2:
        return
    above, below = sympy.fraction(sympy.cancel(-terms[0] / terms[1]))
    if isinstance(above, sympy.Symbol) and isinstance(below, sympy.Symbol):
        yield above, below
