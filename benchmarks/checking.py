"""Cost of the checks of pipeline() beside torch.export: of published models at a tiny size, as shares of its time.

The checks are all that compares a trace with other runs of the model, and all that keeps a trace from leaving
something behind: histories, runs without a tracer and their comparison, snapshots of what the model's code can reach.
The same call without them is timed in turn; what it takes less is their cost, and the export within it the measure.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

import pipecut
from pipecut.pipe_ir.tracing import recorder, tracer
from pipecut.pipe_ir.tracing import run as traced_run
from pipecut.pipe_ir.tracing.history import TraceHistory
from pipecut.split import cut
from pipecut.split.stay_whole import Checks, Cuts
from tests.support.transformers_models import make

from .measure import Goal, clock, in_turn, median_ratio, milliseconds, seconds, show_goals, show_table

MODELS = ("gpt2", "llama", "mixtral")
STAGES = 2
CHECKED, UNCHECKED = "checked", "unchecked"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call of pipeline(): in all, and inside torch.export."""

    total: float
    export: float


def run(rounds: int) -> list[Goal]:
    """Measure all models, print the table and the goals."""
    sides = {(name, side): functools.partial(_time, name, side) for name in MODELS for side in (CHECKED, UNCHECKED)}
    timings = in_turn(sides, rounds, "checking")
    shares = {name: _shares(timings[name, CHECKED], timings[name, UNCHECKED]) for name in MODELS}
    show_table(
        f"pipeline() of published models, {STAGES} stages: CPU milliseconds, medians of {rounds} rounds",
        ["model", "checked", "unchecked", "export within"],
        [
            [
                name,
                milliseconds([timing.total for timing in timings[name, CHECKED]]),
                milliseconds([timing.total for timing in timings[name, UNCHECKED]]),
                milliseconds([timing.export for timing in timings[name, UNCHECKED]]),
            ]
            for name in MODELS
        ],
    )
    return show_goals([Goal(f"{name}: checks, of torch.export's time", shares[name], 0.35) for name in MODELS])


def _shares(checked: list[Timing], unchecked: list[Timing]) -> float:
    costs = [one.total - other.total for one, other in zip(checked, unchecked, strict=True)]
    return median_ratio(costs, [timing.export for timing in unchecked])


def _time(name: str, side: str) -> Timing:
    model, batch = make(name)
    spent = [0.0]
    export = torch.export.export

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        try:
            return export(*args, **kwargs)
        finally:
            spent[0] += clock() - begin

    with (
        patch.object(torch.export, "export", timed),
        _without_checks() if side == UNCHECKED else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        total = seconds(lambda: pipecut.pipeline(model, (), batch, num_stages=STAGES))
    return Timing(total, spent[0])


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """Leave out what the checks of pipeline() do; the trace and the cut stay what they are."""
    with contextlib.ExitStack() as patches:
        for owner in (traced_run, tracer):
            patches.enter_context(patch.object(owner, "run_untouched", _run_unguarded))
        patches.enter_context(patch.object(recorder, "TraceHistory", _NoHistory))
        patches.enter_context(patch.object(cut, "Checks", _NoChecks))
        yield


def _run_unguarded(model: object, function: Callable[[Any], Any], **options: Any) -> Any:
    return function(_NoWatch())


class _NoWatch(contextlib.nullcontext[None]):
    def stop(self) -> None: ...


class _NoHistory(TraceHistory):
    """History in which nothing is noted."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...

    def begin(self, *_: Any) -> None: ...

    def enter(self, *_: Any) -> Any: ...

    def leave(self, *_: Any) -> None: ...


class _NoChecks(Checks):
    """Checks that find nothing."""

    def __init__(self, *_: Any, **options: Any) -> None: ...

    def changing_paths(self, cuts: Cuts) -> set[str]:
        return set()

    def kept_whole(self, cuts: Cuts, *_: Any) -> Cuts:
        return cuts
