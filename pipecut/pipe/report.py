"""A Pipe as text: a table of its stages, its edges and ties, and the generated code."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..errors import printable
from ..pipe_ir import (
    Condition,
    Edge,
    FixedDim,
    RecomputedValue,
    TensorSpec,
    TracedInput,
    TracedModel,
    has_forward_hooks,
)
from ..text import counted, format_bytes, listed

if TYPE_CHECKING:
    from .pipe import Pipe


_WIDTH = 120


def describe(pipe: Pipe) -> str:
    """Return the table of stages, then what goes between them, then what deserves a second look."""
    parts = [_stage_table(pipe)]
    if pipe.balance:
        parts.append(f"balance: {pipe.balance}")
    if pipe.edges:
        parts.append("edges\n" + "\n".join(f"  {_edge(edge)}" for edge in pipe.edges))
    if pipe.unsent:
        parts.append(unsent_text(pipe))
    parts += [f"recomputed in {text}" for text in _recomputed(pipe)]
    parts += [
        f"tied: {' = '.join(tie.names)} in stages {', '.join(map(str, tie.stages))} (owner: stage {tie.owner})"
        for tie in pipe.tied_parameters
    ]
    if pipe.unused_parameters:
        parts.append(f"unused parameters: {', '.join(pipe.unused_parameters)}")
    sizes = ", ".join(f"{name}={size}" for name, size in pipe.traced.hints.items())
    if sizes:
        parts.append(f"symbolic dims, as in the example: {sizes}")
    return printable("\n".join(parts))


def unsent_text(pipe: Pipe) -> str:
    """Return in one line what stays where it is made, and what that saves."""
    names = dict.fromkeys(each.name.partition(".")[0].partition("[")[0] or each.name for each in pipe.unsent)
    sizes = [_example_bytes(each.spec, pipe.traced.hints) for each in pipe.unsent]
    return (
        f"not sent in training: {listed(names)}, {counted(len(sizes), 'value')} of {format_bytes(sum(sizes))} "
        'per microbatch that only the caller would read; outputs="all" in pipeline() sends them'
    )


def _recomputed(pipe: Pipe) -> list[str]:
    """List for each stage the values that it makes itself instead of receiving them."""
    by_stage: dict[int, list[RecomputedValue]] = {}
    for value in pipe.recomputed:
        by_stage.setdefault(value.stage, []).append(value)
    return [
        f"stage {stage}: {', '.join(value.name for value in values)} "
        f"(would be {format_bytes(sum(_example_bytes(value.spec, pipe.traced.hints) for value in values))})"
        for stage, values in by_stage.items()
    ]


def _example_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Return the size of a tensor in the example."""
    known = {**dict.fromkeys(map(str, spec.symbols), 1), **sizes}  # a size that depends on the data counts as one
    bound = spec.bind(known)
    return math.prod(map(int, bound.shape)) * spec.dtype.itemsize


def readable(pipe: Pipe) -> str:
    """Return the generated code of all stages."""
    return "\n".join(
        f"# stage {info.index}, {path or 'the stage itself'}\n{source}"
        for info in pipe.stage_infos
        for path, source in info.code.items()
    )


def _stage_table(pipe: Pipe) -> str:
    title = f"{type(pipe.traced.model).__name__} in {counted(pipe.num_stages, 'stage')}"
    table = Table(title=title, title_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("modules")
    table.add_column("parameters", justify="right")
    table.add_column("FLOPs", justify="right")
    table.add_column("inputs")
    table.add_column("outputs")
    specs = {value: str(op.spec) for value, op in enumerate(pipe.traced.operations)}
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
    Console(file=buffer, width=_WIDTH, markup=False, highlight=False).print(table)
    return buffer.getvalue().rstrip()


def _edge(edge: Edge) -> str:
    distance = edge.target - edge.source
    skip = f" (skips {counted(distance - 1, 'stage')})" if distance > 1 else ""
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
    """Fold runs of numbered paths into one entry.

    >>> fold(["wte", "h.0", "h.1", "h.2", "ln"])
    ['wte', 'h.0 to h.2', 'ln']
    """
    folded: list[list[str]] = []
    for path in paths:
        if folded and _follows(folded[-1][-1], path):
            folded[-1].append(path)
        else:
            folded.append([path])
    return [printable(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}", lines=False) for run in folded]


def _follows(before: str, path: str) -> bool:
    parts = [re.fullmatch(r"(.*?)(\d+)", text) for text in (before, path)]
    if parts[0] is None or parts[1] is None:
        return False
    return parts[0][1] == parts[1][1] and int(parts[0][2]) + 1 == int(parts[1][2])


# pipe.explain(): in plain words, what was traced, what is fixed by that, and what goes where.


_PROSE_WIDTH = 120


@dataclass(frozen=True)
class _Section:
    """A heading and the sentences below it."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Explanation:
    """Facts about a cut model, as text in sections; print it, or look at the sections.

    >>> print(Explanation("Net in 2 stages", (_Section("sizes", ("batch: any size",)),)))
    Net in 2 stages
    sizes
      - batch: any size
    """

    title: str
    sections: tuple[_Section, ...]

    def __getitem__(self, title: str) -> tuple[str, ...]:
        """Return the sentences below a heading; none if there is nothing to say."""
        return next((section.lines for section in self.sections if section.title == title), ())

    def __iter__(self) -> Iterator[str]:
        """Yield the headings; without this, `in` and `for` would count up to no end."""
        return (section.title for section in self.sections)

    def __str__(self) -> str:
        parts = [self.title]
        for section in self.sections:
            parts.append(section.title)
            parts += [_bullet(line) for line in section.lines]
        return "\n".join(parts)

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        for section in self.sections:
            yield Text(section.title, style="bold")
            yield from (Text(_bullet(line)) for line in section.lines)


def explain(pipe: Pipe) -> Explanation:
    """Return all sections that have something to say."""
    title = f"{_name(pipe.traced)} in {counted(pipe.num_stages, 'stage')}"
    sections = (_Section(heading, tuple(lines_of(pipe))) for heading, lines_of in _SECTIONS.items())
    return Explanation(title, tuple(section for section in sections if section.lines))


def _traced(pipe: Pipe) -> Iterator[str]:
    traced = pipe.traced
    operations = sum(op.kind == "op" for op in traced.operations)
    calls = sum(1 for _ in traced.spans("call"))
    mode = "training" if traced.training else "evaluation"
    yield f"{_name(traced)} in {mode} mode, on {traced.device}: {operations} operations in {calls} module calls"
    tensors = [f"{entry.path} {entry.spec}" for entry in traced.inputs if entry.value is not None]
    sizes = ", ".join(f"{name} = {size}" for name, size in traced.hints.items())
    yield f"the example: {', '.join(tensors) or 'no tensors'}{f', where {sizes}' if sizes else ''}"


def _sizes(pipe: Pipe) -> Iterator[str]:
    traced = pipe.traced
    for symbol in traced.dims:
        mine = [condition for condition in traced.conditions if symbol in condition.holds.free_symbols]
        if mine:
            yield f"{symbol} may change from call to call, as long as {'; '.join(map(_condition, mine))}"
        else:
            yield f"{symbol} may change from call to call: the code that is cut decides nothing by it"


def _condition(condition: Condition) -> str:
    return f"{condition} (decided at {condition.source})" if condition.source else str(condition)


def _specialised(pipe: Pipe) -> Iterator[str]:
    traced = pipe.traced
    known = {(fixed.path, fixed.dim): fixed for fixed in traced.fixed_dims}
    yield from map(_fixed, known.values())
    numbers = [text for entry in traced.inputs for text in _example_sizes(entry, known)]
    if numbers:
        yield f"{', '.join(numbers)}: as in the example, since nobody asked for anything else"
    values = [f"{entry.path} = {entry.constant!r}" for entry in traced.inputs if entry.value is None]
    if values:
        yield f"{', '.join(values)}: Python values are part of the trace, and a call with others is an error"


def _fixed(fixed: FixedDim) -> str:
    called = f"{fixed.name}, dim {fixed.dim} of {fixed.path}" if fixed.name else f"dim {fixed.dim} of {fixed.path}"
    return f"{called}, is always {fixed.size}: {f'fixed at {fixed.source}' if fixed.source else 'the code fixes it'}"


def _example_sizes(entry: TracedInput, known: Mapping[tuple[str, int], FixedDim]) -> Iterator[str]:
    for dim, size in enumerate(entry.spec.shape if entry.spec is not None else ()):
        if isinstance(size, int) and (entry.path, dim) not in known:
            yield f"dim {dim} of {entry.path} is {size}"


def _balance(pipe: Pipe) -> Iterator[str]:
    if pipe.balance:
        yield pipe.balance


def _modules(pipe: Pipe) -> Iterator[str]:
    for info in pipe.stage_infos:
        cut = [path or "the model itself" for path in info.code]
        whole = f"whole, running their own code: {', '.join(fold(info.modules))}; " if info.modules else ""
        yield f"stage {info.index}: {whole}as generated code: {', '.join(fold(cut))}"


def _hooks_and_attributes(pipe: Pipe) -> Iterator[str]:
    traced = pipe.traced
    generated = sorted({path.partition("#")[0] for info in pipe.stage_infos for path in info.code})
    for path in generated:
        if has_forward_hooks(traced.model.get_submodule(path)):
            yield f"{path or _name(traced)} has a forward hook: what it does to tensors is part of the generated code"
        if path in traced.assigned_attributes:
            names = ", ".join(f"self.{name}" for name in traced.assigned_attributes[path])
            yield f"{path or _name(traced)} sets {names} in its forward: the stages keep the value of the trace"


def _fallbacks(pipe: Pipe) -> Iterator[str]:
    for fallback in pipe.traced.fallbacks:
        yield f"{fallback.path or _name(pipe.traced)} {fallback.because}, and stays as it is: {fallback.reason}"


def _edges(pipe: Pipe) -> Iterator[str]:
    routes: dict[tuple[int, int], list[Edge]] = {}
    for edge in pipe.edges:
        routes.setdefault((edge.source, edge.target), []).append(edge)
    for (source, target), edges in sorted(routes.items()):
        yield (
            f"stage {source} -> {target}{_skips(target - source)}: {listed(edge.name for edge in edges)}, "
            f"{_total(pipe, edges)}"
        )
    late = {edge.name for edge in pipe.edges if edge.kind == "root input"}
    if late:
        yield f"model inputs that later stages use, sent by stage 0: {', '.join(sorted(late))}"


def _skips(distance: int) -> str:
    return f" (skips {counted(distance - 1, 'stage')})" if distance > 1 else ""


def _total(pipe: Pipe, edges: Iterable[Edge]) -> str:
    return format_bytes(sum(_example_bytes(edge.spec, pipe.traced.hints) for edge in edges))


def _recomputed_section(pipe: Pipe) -> Iterator[str]:
    yield from _recomputed(pipe)
    if pipe.recomputed:
        yield (
            "these depend on sizes, buffers and model inputs alone, and cost less to make again than to send; what is "
            "changed later in the module that first makes them, such as a hook, does not reach them"
        )


def _only_returned(pipe: Pipe) -> Iterator[str]:
    edges = [edge for edge in pipe.edges if edge.target == pipe.num_stages - 1 and edge.value in pipe.only_returned]
    if edges:
        number = f"{len(edges)} values" if len(edges) > 1 else "1 value"
        verb = ("come", "are") if len(edges) > 1 else ("comes", "is")
        yield (
            f"the model's output has {number} of {_total(pipe, edges)} that {verb[0]} from earlier stages and "
            f"{verb[1]} sent to the last only to be returned: {listed(edge.name for edge in edges)}. If nobody needs "
            "them in a training step, leave them out of `outputs` in pipeline()"
        )


def _unsent(pipe: Pipe) -> Iterator[str]:
    if pipe.unsent:
        yield unsent_text(pipe)
        yield (
            "in their places the result of step(), and what loss_fn gets, has objects that raise an error when "
            "they are used; eval() and pipe(...) return the outputs"
        )


def _parameters(pipe: Pipe) -> Iterator[str]:
    for tie in pipe.tied_parameters:
        names = " = ".join(tie.names)
        yield f"{names} is in stages {', '.join(map(str, tie.stages))}: one parameter, its gradients are summed"
    if pipe.unused_parameters:
        yield f"nothing uses {', '.join(fold(pipe.unused_parameters))}"


def _name(traced: TracedModel) -> str:
    return type(traced.model).__name__


def _bullet(line: str) -> str:
    return textwrap.fill(
        printable(line),
        _PROSE_WIDTH,
        initial_indent="  - ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


_SECTIONS: dict[str, Callable[[Pipe], Iterator[str]]] = {
    "traced": _traced,
    "sizes": _sizes,
    "fixed by the trace": _specialised,
    "balance": _balance,
    "modules": _modules,
    "hooks and attributes": _hooks_and_attributes,
    "not traced": _fallbacks,
    "sent between stages": _edges,
    "recomputed": _recomputed_section,
    "sent only to be returned": _only_returned,
    "not sent": _unsent,
    "parameters": _parameters,
}
