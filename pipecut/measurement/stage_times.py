"""The times of one stage module: forward, the gradients of its inputs, those of its weights, or both in one go."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..pipe_ir.structure import flatten
from ..split.costs.times import Times
from ..stage.backward import StageWeights, full_backward, input_backward, weight_backward

LEAST_RUNS, MOST_RUNS = 7, 50
ENOUGH_SECONDS = 0.2

Run = tuple[float, float, float]  # seconds of a forward, of the gradients of the inputs, and of those of the weights


def measure_stage(module: nn.Module, inputs: Sequence[Any]) -> Times:
    """Run a module some times on its inputs; of each part the median, as a step has its share of slow ones too.

    Gradients are left in the module's parameters.
    """
    weights = StageWeights(parameter for parameter in module.parameters() if parameter.requires_grad)
    split_run(module, inputs, weights)
    runs: list[Run] = []
    begin = time.perf_counter()
    while len(runs) < LEAST_RUNS or (len(runs) < MOST_RUNS and time.perf_counter() - begin < ENOUGH_SECONDS):
        runs += split_run(module, inputs, weights)
    return Times(*map(statistics.median, zip(*runs, strict=True)))


def split_run(module: nn.Module, inputs: Sequence[Any], weights: StageWeights, at_once: int = 1) -> list[Run]:
    """Some forwards, and then their backwards in halves."""
    found = []
    for forward, leaves, outputs in [_forward(module, inputs) for _ in range(at_once)]:
        first, (_, pending) = _timed(input_backward, outputs, _ones(outputs), leaves, weights)
        second, _ = _timed(weight_backward, pending)
        found.append((forward, first, second))
    return found


def full_run(module: nn.Module, inputs: Sequence[Any], at_once: int = 1) -> list[Run]:
    """Some forwards, and then their backwards; those of the weights are among those of the inputs."""
    found = []
    for forward, leaves, outputs in [_forward(module, inputs) for _ in range(at_once)]:
        backward, _ = _timed(full_backward, outputs, _ones(outputs), leaves)
        found.append((forward, backward, 0.0))
    return found


def _forward(module: nn.Module, inputs: Sequence[Any]) -> tuple[float, list[Any], list[Tensor]]:
    leaves = [_leaf(value) for value in inputs]
    seconds, result = _timed(module, *leaves)
    outputs = [
        value for value in flatten(result)[0] if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    ]
    return seconds, leaves, outputs


def _ones(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(output) for output in outputs]


def _leaf(value: Any) -> Any:
    """A value as it arrives from another stage: nothing of its past is known."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    wait_for_device()
    begin = time.perf_counter()
    result = call(*args)
    wait_for_device()
    return time.perf_counter() - begin, result


def wait_for_device() -> None:
    """What was started on an accelerator is done only when it says so."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
