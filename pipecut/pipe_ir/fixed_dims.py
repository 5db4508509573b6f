"""Sizes that were to be symbolic, and that the model's code has tied down: to a number, or to another size."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import sympy

from ..errors import PipeWarning
from .dynamic import DynamicDims, Place
from .recorder import Recorder
from .spec import Dim
from .traced import FixedDim, TracedInput, TracedModel


def find_fixed_dims(
    run: Recorder, asked: DynamicDims, inputs: Sequence[TracedInput], steps: Sequence[int]
) -> tuple[FixedDim, ...]:
    """The dims of inputs that are no symbol of their own any more, though the trace began with one; in their order."""
    by_step = {entry.step: entry for entry in inputs}
    lines = {
        (nth, dim): _line(run, expr)
        for nth, sizes in enumerate(run.decisions.input_sizes)
        for dim, expr in enumerate(sizes)
        if isinstance(expr, sympy.Symbol)
    }
    found = []
    for nth, dim in sorted({*lines, *asked.asked}):
        entry, name, line = by_step[steps[nth]], asked.asked.get((nth, dim)), lines.get((nth, dim), "")
        assert entry.spec is not None
        size, wanted = entry.spec.shape[dim], (nth, dim) in asked.asked
        fixed = isinstance(size, int) and (wanted or line != "" or dim == 0)
        if fixed or (name is not None and str(size) != name):
            source = line or _line_of_name(name, lines, asked.names)
            found.append(FixedDim(entry.path, dim, name, size, source, wanted))
    return tuple(found)


def _line(run: Recorder, symbol: sympy.Basic) -> str:
    """The line that replaced a symbol, or replaced what it had been replaced by."""
    line = ""
    while symbol in run.decisions.replaced:
        symbol, line = run.decisions.replaced[symbol]
    return line


def _line_of_name(name: str | None, lines: Mapping[Place, str], names: Mapping[Place, str]) -> str:
    """The line that replaced another dim of this name."""
    found = [line for place, line in lines.items() if line and name is not None and names.get(place) == name]
    return found[0] if found else ""


def warn_of_fixed_dims(traced: TracedModel) -> None:
    """One warning about all sizes that the user wants symbolic and that are not; the batch is always wanted."""
    fixed = [fixed for fixed in traced.fixed_dims if fixed.asked]
    firsts = [size for entry in traced.inputs if entry.spec is not None for size in entry.spec.shape[:1]]
    has_batch = any(not isinstance(size, int) for size in firsts)
    if not has_batch and not any(entry.dim == 0 for entry in fixed):
        fixed = [entry for entry in traced.fixed_dims if entry.dim == 0][:1] + fixed
    by_size: dict[tuple[str | int, Dim], list[FixedDim]] = {}
    for entry in fixed:
        by_size.setdefault((entry.name or f"{entry.path}, dim {entry.dim}", entry.size), []).append(entry)
    if by_size:
        what = "\n".join(_told(entries) for entries in by_size.values())
        told = f"the trace of {type(traced.model).__name__} holds for some sizes only:\n{what}"
        warnings.warn(told, PipeWarning, stacklevel=3)


def _told(entries: Sequence[FixedDim]) -> str:
    first = entries[0]
    places = " and ".join(f"dim {entry.dim} of {entry.path}" for entry in entries)
    subject = f"{first.name} ({places})" if first.name else places
    why = f"fixed at {first.source}" if first.source else "fixed by the model's code"
    if isinstance(first.size, int):
        return f"  {subject} is always {first.size}: {why}"
    return f"  {subject} is always {first.size}: {why}. If they may differ, trace with an example in which they do"
