"""The stages of a cut, run some times as they will run: what each computation takes."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import PipeError
from ..pipe_ir.pipe import Pipe
from ..split.costs.times import Times
from ..stage.backward import StageWeights
from .stage_times import Run, full_run, split_run
from .walk import example_values, walk

SECONDS = 0.6  # for all stages of a rank
LEAST_RUNS = 5
MOST_AT_ONCE = 4


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch in one stage; a full backward may take less than its halves."""

    split: Times
    full_backward: float


class StageFailure(PipeError):  # noqa: N818
    """A stage does not run with what arrives at it."""


@dataclass(frozen=True)
class Rehearsal:
    """What is to run: a pipe, at some sizes of its symbolic dims, with activations computed again or not."""

    pipe: Pipe
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: Mapping[str, int]
    recompute: bool

    def prepare(self, stages: Collection[int], in_flight: Sequence[float]) -> Callable[[], dict[int, StageTimes]]:
        """Get copies of some stages ready, with what arrives at them; the result measures them."""
        device = self.pipe.traced.device
        values = example_values(self.pipe.traced, self.args, self.kwargs, device, self.sizes)
        ready: dict[int, Callable[[float], StageTimes]] = {}
        with torch.random.fork_rng(), _failures_told():
            for index, module, inputs in walk(self.pipe, values, device):
                if index in stages:
                    if self.recompute:
                        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
                    at_once = max(1, min(MOST_AT_ONCE, int(in_flight[index])))
                    ready[index] = functools.partial(_measure, module, list(inputs), at_once)

        def measure() -> dict[int, StageTimes]:
            with torch.random.fork_rng(), torch.enable_grad(), _failures_told():
                return {index: run(SECONDS / len(ready)) for index, run in ready.items()}

        return measure


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StageFailure(f"{type(error).__name__}: {error}") from error


def _measure(module: nn.Module, inputs: Sequence[Any], at_once: int, seconds: float) -> StageTimes:
    """The mean of each computation, as a step has its share of slow ones; full and split backwards take turns."""
    weights = StageWeights(parameter for parameter in module.parameters() if parameter.requires_grad)
    runs: tuple[list[Run], list[Run]] = ([], [])
    begin = time.perf_counter()
    while len(runs[1]) < LEAST_RUNS + 1 or time.perf_counter() - begin < seconds:
        runs[0].extend(full_run(module, inputs, at_once))
        runs[1].extend(split_run(module, inputs, weights, at_once))
    full, split = runs[0][1:], runs[1][1:]  # the first ones warm up
    times = Times(
        statistics.fmean(run[0] for run in [*full, *split]),
        statistics.fmean(run[1] for run in split),
        statistics.fmean(run[2] for run in split),
    )
    return StageTimes(times, statistics.fmean(run[1] for run in full))
