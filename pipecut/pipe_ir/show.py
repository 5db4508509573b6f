"""A Pipe as text: a table of its stages, its edges and ties, and the generated code."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import sympy
from rich.console import Console
from rich.table import Table

from .spec import TensorSpec

if TYPE_CHECKING:
    from .pipe import Edge, Pipe, RecomputedValue

WIDTH = 120


def describe(pipe: Pipe) -> str:
    """The table of stages, then what goes between them, then what deserves a second look."""
    parts = [_stage_table(pipe)]
    if pipe.balance:
        parts.append(f"balance: {pipe.balance}")
    if pipe.edges:
        parts.append("edges\n" + "\n".join(f"  {_edge(edge)}" for edge in pipe.edges))
    parts += [f"recomputed in {text}" for text in recomputed(pipe)]
    parts += [
        f"tied: {' = '.join(tie.names)} in stages {', '.join(map(str, tie.stages))} (owner: stage {tie.owner})"
        for tie in pipe.tied_parameters
    ]
    if pipe.unused_parameters:
        parts.append(f"unused parameters: {', '.join(pipe.unused_parameters)}")
    sizes = ", ".join(f"{name}={size}" for name, size in pipe.traced.hints.items())
    if sizes:
        parts.append(f"symbolic dims, as in the example: {sizes}")
    return "\n".join(parts)


def recomputed(pipe: Pipe) -> list[str]:
    """For each stage, the values that it makes itself instead of receiving them."""
    by_stage: dict[int, list[RecomputedValue]] = {}
    for value in pipe.recomputed:
        by_stage.setdefault(value.stage, []).append(value)
    return [
        f"stage {stage}: {', '.join(value.name for value in values)} "
        f"(would be {bytes_text(sum(example_bytes(value.spec, pipe.traced.hints) for value in values))})"
        for stage, values in by_stage.items()
    ]


def example_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """The size of a tensor in the example."""
    bound = spec.bind(sizes)
    return math.prod(map(int, bound.shape)) * spec.dtype.itemsize


def bytes_text(count: int) -> str:
    """A number of bytes, with three digits.

    >>> bytes_text(80), bytes_text(4_200), bytes_text(1_340_000_000)
    ('80 B', '4.2 kB', '1.34 GB')
    """
    return _with_unit(count, "B")


def readable(pipe: Pipe) -> str:
    """The generated code of all stages."""
    return "\n".join(
        f"# stage {info.index}, {path or 'the stage itself'}\n{source}"
        for info in pipe.stage_infos
        for path, source in info.code.items()
    )


def _stage_table(pipe: Pipe) -> str:
    title = f"{type(pipe.traced.model).__name__} in {pipe.num_stages} stage{'s' if pipe.num_stages > 1 else ''}"
    table = Table(title=title, title_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("modules")
    table.add_column("parameters", justify="right")
    table.add_column("FLOPs", justify="right")
    table.add_column("inputs")
    table.add_column("outputs")
    specs = {value: str(step.spec) for value, step in enumerate(pipe.traced.steps)}
    for info, stage in zip(pipe.stage_infos, pipe.stages, strict=True):
        count = sum(parameter.numel() for parameter in stage.parameters())
        inputs = [f"{name} {specs[value]}" for value, name in zip(info.inputs, info.input_names, strict=True)]
        outputs = [f"{name} {specs[value]}" for value, name in zip(info.outputs, info.output_names, strict=True)]
        last = info.index == pipe.num_stages - 1
        table.add_row(
            str(info.index),
            ", ".join(fold(info.modules)),
            f"{count:,}",
            _flops(info.flops, pipe),
            "\n".join(inputs),
            "the model's output" if last else "\n".join(outputs),
        )
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, markup=False, highlight=False).print(table)
    return buffer.getvalue().rstrip()


def _edge(edge: Edge) -> str:
    distance = edge.target - edge.source
    skip = f" (skips {distance - 1} stage{'s' if distance > 2 else ''})" if distance > 1 else ""
    return f"{edge.kind} {edge.name}: stage {edge.source} -> {edge.target}{skip}  {edge.spec}"


def _flops(flops: sympy.Expr, pipe: Pipe) -> str:
    number = float(flops.subs({symbol: pipe.traced.hints.get(str(symbol), 1) for symbol in flops.free_symbols}))
    return _with_unit(number).rstrip()


def _with_unit(number: float, unit: str = "") -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def fold(paths: Sequence[str]) -> list[str]:
    """Runs of numbered paths as one entry.

    >>> fold(["wte", "h.0", "h.1", "h.2", "ln"])
    ['wte', 'h.0 to h.2', 'ln']
    """
    folded: list[list[str]] = []
    for path in paths:
        if folded and _follows(folded[-1][-1], path):
            folded[-1].append(path)
        else:
            folded.append([path])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in folded]


def _follows(before: str, path: str) -> bool:
    parts = [re.fullmatch(r"(.*?)(\d+)", text) for text in (before, path)]
    if parts[0] is None or parts[1] is None:
        return False
    return parts[0][1] == parts[1][1] and int(parts[0][2]) + 1 == int(parts[1][2])
