"""The conditions on sizes that a trace rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from .effects import operator_name
from .recorder import Recorder
from .symbols import Symbols
from .traced import Condition, Step


def find_conditions(
    run: Recorder, symbols: Symbols, steps: Sequence[Step], span_ticks: Mapping[int, tuple[int, int]]
) -> tuple[Condition, ...]:
    """What the code decided about sizes, and what follows from operations that treat a size of 1 apart."""
    decided = [
        Condition(holds, run.decisions.lines[expr, answer, id(span)], span_ticks[id(span)][0])
        for (expr, answer), spans in run.decisions.made.items()
        for holds in [_in_words(symbols, expr, answer)]
        if holds is not None
        for span in spans.values()
    ]
    squeezed = [
        Condition(sympy.Ne(dim, 1), step.source, step.tick)
        for step in steps
        if operator_name(step.target) == "aten::squeeze"
        for dim in _squeezed_dims(steps, step)
    ]
    return (*decided, *squeezed)


def _in_words(symbols: Symbols, expr: sympy.Basic, answer: Any) -> sympy.Basic | None:
    """A decision in the names of the dims; None for what holds for all sizes, or depends on data."""
    is_yes_or_no = isinstance(expr, sympy.logic.boolalg.Boolean)
    holds = (expr if answer else sympy.Not(expr)) if is_yes_or_no else sympy.Eq(expr, answer)
    renamed = symbols.renamed(holds)
    return None if renamed == sympy.true else renamed


def _squeezed_dims(steps: Sequence[Step], step: Step) -> list[sympy.Basic]:
    """The symbolic dims that a squeeze would drop at size 1, and the trace has kept."""
    spec = steps[step.refs[0]].spec
    shape = spec.shape if spec is not None else ()
    if len(step.args) > 1:
        dims = step.args[1] if isinstance(step.args[1], list | tuple) else [step.args[1]]
        shape = tuple(shape[dim] for dim in dims)
    return [dim for dim in shape if isinstance(dim, sympy.Basic)]
