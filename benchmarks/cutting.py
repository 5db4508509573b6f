"""How long cutting takes, apart from the export that it starts from, as a model grows.

Both sides call torch.export.export inside their pipeline(). That call is timed where it happens and taken off, so
that what is left is each side's own work. Of pipecut's work a part happens during the export (it records the calls of
modules while they are traced); that part is timed too and counts as cutting.

pipecut exports with a symbolic batch, upstream with fixed sizes. That costs pipecut more, and buys pipes that take any
batch size. The totals, and two plain exports measured apart, show how much.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch

import pipecut
from examples.gpt import GPT, GPTConfig, random_tokens
from pipecut.pipe_ir.tracing.recorder import Recorder

from .cuts import cut_by_upstream, cut_ours, even_cuts
from .measure import Goal, clock, console, in_turn, median_ratio, milliseconds, seconds, show_goals, show_table

LAYERS = (12, 24, 48)
REPEATED = (8, 80)  # of a Llama: layers that are equal are computed once
STAGES, LARGE_STAGES = 4, 8
OURS, AUTOMATIC, UPSTREAM = "pipecut, split_spec", "pipecut, num_stages", "upstream, split_spec"
STATIC, SYMBOLIC = "export alone, fixed sizes", "export alone, symbolic batch"
CUTS, EXPORTS = (OURS, AUTOMATIC, UPSTREAM), (STATIC, SYMBOLIC)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: in all, inside torch.export.export, and of that in pipecut's recorder."""

    total: float
    export: float
    recording: float

    @property
    def cutting(self) -> float:
        return self.total - self.export + self.recording


Timings: TypeAlias = dict[tuple[int, str], list[Timing]]


def run(rounds: int) -> list[Goal]:
    """Measure all sizes, print the tables and the goals."""
    sides = {(layers, name): side for layers in LAYERS for name, side in _sides(layers).items()}
    timings = in_turn(sides, rounds, "cutting")
    show_table(
        f"pipeline() of a GPT, {STAGES} stages: CPU milliseconds, medians of {rounds} rounds",
        ["layers, side", "total", "export within", "recording within", "cutting", "cutting a layer"],
        [_row(timings, layers, name) for layers in LAYERS for name in (*CUTS, *EXPORTS)],
    )
    show_table(
        f"{OURS}, against {UPSTREAM}: ratios, medians of {rounds} rounds",
        ["layers", "cutting", "total", "total less the export alone with fixed sizes"],
        [_comparison(timings, layers) for layers in LAYERS],
    )
    repeated = in_turn({layers: functools.partial(_time_llama, layers) for layers in REPEATED}, 1, "repeated layers")
    few, many = REPEATED
    growth = median_ratio(repeated[many], repeated[few])
    goal = Goal(f"a small Llama: pipeline() of {many} layers, of that of {few}", growth, 1.6)
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        taken, memory, report = fresh.apply(_cut_large)
    console.print(f"Llama of 70B on the meta device, {LARGE_STAGES} stages: {taken:.1f} s; {report}", highlight=False)
    large = Goal("Llama of 70B on the meta device: megabytes that cutting it takes", memory, 600)
    return show_goals([*_goals(timings), goal, large])


def _cut_large() -> tuple[float, float, str]:
    """Cut a Llama of 70B in a fresh process: CPU seconds, megabytes at the peak above those before, the balance."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, use_cache=False, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        example = torch.zeros((1, 4096), dtype=torch.long)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    pipes = []
    taken = seconds(lambda: pipes.append(pipecut.pipeline(model, (example,), num_stages=LARGE_STAGES)))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return taken, (peak - before) / 1e6, pipes[0].balance


def _time_llama(layers: int) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    model, example = LlamaForCausalLM(config), torch.randint(0, 256, (2, 16))
    return seconds(lambda: pipecut.pipeline(model, (example,), num_stages=STAGES))


def _sides(layers: int) -> dict[str, Callable[[], Timing]]:
    config = GPTConfig(layers=layers)
    example = random_tokens(config, batch=4)
    cuts = even_cuts(layers, STAGES)
    symbolic = {"tokens": {0: torch.export.Dim.AUTO}}
    calls: dict[str, Callable[[GPT], object]] = {
        OURS: lambda model: cut_ours(model, example, cuts),
        UPSTREAM: lambda model: cut_by_upstream(model, example, cuts),
        AUTOMATIC: lambda model: pipecut.pipeline(model, (example,), num_stages=STAGES),
        STATIC: lambda model: torch.export.export(model, (example,), strict=False),
        SYMBOLIC: lambda model: torch.export.export(model, (example,), dynamic_shapes=symbolic, strict=False),
    }
    return {name: functools.partial(_time, call, config) for name, call in calls.items()}


def _time(call: Callable[[GPT], object], config: GPTConfig) -> Timing:
    model = GPT(config)
    with _timed_export() as export, _timed_recorder(export) as recording:
        total = seconds(lambda: call(model))
    return Timing(total, export.seconds, recording.seconds)


class Stopwatch:
    """Adds up the time in the functions that it wraps, or of that what falls within another stopwatch's functions."""

    def __init__(self, within: Stopwatch | None = None) -> None:
        self.seconds = 0.0
        self.depth = 0
        self._within = within

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed; one that another one calls is not counted twice."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0 and (self._within is None or self._within.depth):
                    self.seconds += clock() - begin

        return timed


@contextlib.contextmanager
def _timed_export() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    with patch.object(torch.export, "export", watch.wrap(torch.export.export)):
        yield watch


@contextlib.contextmanager
def _timed_recorder(export: Stopwatch) -> Iterator[Stopwatch]:
    """Time what pipecut's recorder does while torch.export runs."""
    watch = Stopwatch(within=export)
    with contextlib.ExitStack() as patches:
        for name, member in list(vars(Recorder).items()):
            if inspect.isfunction(member) and name != "__init__" and not inspect.isgeneratorfunction(member):
                patches.enter_context(patch.object(Recorder, name, watch.wrap(member)))
        yield watch


def _row(timings: Timings, layers: int, name: str) -> list[str]:
    of = functools.partial(_part, timings, layers, name)
    row = [f"{layers}, {name}", milliseconds(of("total"))]
    if name in EXPORTS:
        return row
    return [
        *row,
        *(milliseconds(of(part)) for part in ("export", "recording", "cutting")),
        milliseconds([time / layers for time in of("cutting")]),
    ]


def _comparison(timings: Timings, layers: int) -> list[str]:
    of = functools.partial(_part, timings, layers)
    fixed = of(STATIC, "total")
    ratios = [
        median_ratio(of(OURS, "cutting"), of(UPSTREAM, "cutting")),
        median_ratio(of(OURS, "total"), of(UPSTREAM, "total")),
        median_ratio(_less(of(OURS, "total"), fixed), _less(of(UPSTREAM, "total"), fixed)),
    ]
    return [str(layers), *(f"{ratio:.3f}" for ratio in ratios)]


def _goals(timings: Timings) -> Iterator[Goal]:
    for layers in LAYERS:
        of = functools.partial(_part, timings, layers)
        ratio = median_ratio(of(OURS, "cutting"), of(UPSTREAM, "cutting"))
        yield Goal(f"{layers} layers: cutting, of upstream's", ratio, 0.5)
        for name in (OURS, AUTOMATIC):
            ratio = median_ratio(of(name, "cutting"), of(SYMBOLIC, "total"))
            yield Goal(f"{layers} layers: cutting ({name}), of an export with a symbolic batch", ratio, 0.25)
    few, many = min(LAYERS), max(LAYERS)
    ratio = median_ratio(_part(timings, many, OURS, "total"), _part(timings, many, UPSTREAM, "total"))
    yield Goal(f"{many} layers: pipeline() in all, of upstream's", ratio, 0.25)
    for name in (OURS, AUTOMATIC):
        growth = median_ratio(_part(timings, many, name, "cutting"), _part(timings, few, name, "cutting"))
        yield Goal(f"cutting a layer ({name}), {many} layers against {few}", growth * few / many, 1.5)


def _part(timings: Timings, layers: int, name: str, part: str) -> list[float]:
    """One number of each round."""
    return [getattr(timing, part) for timing in timings[layers, name]]


def _less(times: list[float], others: list[float]) -> list[float]:
    return [time - other for time, other in zip(times, others, strict=True)]
