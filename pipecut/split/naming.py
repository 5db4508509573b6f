"""Readable, unique Python names for the values of a trace."""

from __future__ import annotations

import keyword
import re

from ..pipe_ir.traced import Ref, TracedModel

_RESERVED = {"self", "device", "checkpoint", "torch", "piece"}


def name_values(traced: TracedModel) -> dict[int, str]:
    """A name for the value of every step: inputs as the user calls them, module results by the module's path."""
    wishes = {step.index: step.name for step in traced.steps}
    for span in traced.spans("call"):
        made = [
            leaf.index
            for leaf in span.result.leaves
            if isinstance(leaf, Ref) and traced.steps[leaf.index].tick >= span.begin
        ]
        for position, index in enumerate(made):
            if span.path and span.begin < traced.steps[index].tick:
                # Outer calls come first in the walk; the innermost module is the one that made the value.
                wishes[index] = span.label if len(made) == 1 else f"{span.label}_{position}"
    return _unique(traced, wishes)


def _unique(traced: TracedModel, wishes: dict[int, str]) -> dict[int, str]:
    taken = {*_RESERVED, *map(str, traced.dims), *keyword.kwlist}
    names: dict[int, str] = {}
    inputs_first = sorted(wishes, key=lambda index: traced.steps[index].kind != "input")
    for index in inputs_first:
        base = re.sub(r"\W+", "_", wishes[index])
        base = base if base.isidentifier() else f"_{base}"
        name, count = base, 1
        while name in taken:
            name, count = f"{base}_{count}", count + 1
        taken.add(name)
        names[index] = name
    return names
