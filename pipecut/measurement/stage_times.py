"""The times of one stage module: forward, the gradients of its inputs, those of its weights, or both in one go."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..pipe_ir.pipe import Pipe
from ..pipe_ir.structure import flatten
from ..split.costs.times import Times
from ..stage.backward import StageWeights, full_backward, input_backward, weight_backward
from .walk import walk

PASSES = 3
LEAST_RUNS, MOST_RUNS = 3, 20
ENOUGH_SECONDS = 0.07

Run = tuple[float, float, float]  # seconds of a forward, of the gradients of the inputs, and of those of the weights


def measure_stages(
    pipe: Pipe, values: Mapping[int, Any], device: torch.device, key: Callable[[int], Hashable] = int
) -> list[Times]:
    """The times of every stage of a pipe: medians, as a step has its share of slow runs too.

    The stages take turns in some passes, for a machine is faster at one time than at another. Those with the same key
    are taken to be the same.
    """
    runs: dict[Hashable, list[Run]] = {}
    for _ in range(PASSES):
        done = set()
        for index, module, inputs in walk(pipe, dict(values), device):
            if key(index) not in done:
                done.add(key(index))
                runs.setdefault(key(index), []).extend(some_runs(module, inputs))
    medians = {name: Times(*map(statistics.median, zip(*found, strict=True))) for name, found in runs.items()}
    return [medians[key(index)] for index in range(pipe.num_stages)]


def some_runs(module: nn.Module, inputs: Sequence[Any]) -> list[Run]:
    """Run a module some times on its inputs. Gradients are left in its parameters."""
    weights = StageWeights(parameter for parameter in module.parameters() if parameter.requires_grad)
    split_run(module, inputs, weights)
    runs: list[Run] = []
    begin = time.perf_counter()
    while len(runs) < LEAST_RUNS or (len(runs) < MOST_RUNS and time.perf_counter() - begin < ENOUGH_SECONDS):
        runs += split_run(module, inputs, weights)
    return runs


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
