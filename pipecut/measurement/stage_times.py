"""The times of one stage module: forward, the gradients of its inputs, those of its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..pipe_ir.structure import flatten
from ..split.costs.times import Times
from ..stage.backward import StageWeights, input_backward, weight_backward

LEAST_RUNS, MOST_RUNS = 6, 30
ENOUGH_SECONDS = 0.1


def measure_stage(module: nn.Module, inputs: Sequence[Any]) -> Times:
    """Run a module some times on its inputs; of each part the shortest time, as what disturbs only makes it longer.

    Gradients are left in the module's parameters.
    """
    weights = StageWeights(parameter for parameter in module.parameters() if parameter.requires_grad)
    _one_run(module, inputs, weights)
    runs: list[Times] = []
    begin = time.perf_counter()
    while len(runs) < LEAST_RUNS or (len(runs) < MOST_RUNS and time.perf_counter() - begin < ENOUGH_SECONDS):
        runs.append(_one_run(module, inputs, weights))
    return Times(
        min(run.forward for run in runs),
        min(run.backward_input for run in runs),
        min(run.backward_weight for run in runs),
    )


def _one_run(module: nn.Module, inputs: Sequence[Any], weights: StageWeights) -> Times:
    leaves = [_leaf(value) for value in inputs]
    forward, result = _timed(lambda: module(*leaves))
    outputs = [
        value for value in flatten(result)[0] if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    ]
    if not outputs:
        return Times(forward)
    gradients = [torch.ones_like(output) for output in outputs]
    backward_input, (_, pending) = _timed(lambda: input_backward(outputs, gradients, leaves, weights))
    backward_weight, _ = _timed(lambda: weight_backward(pending))
    return Times(forward, backward_input, backward_weight)


def _leaf(value: Any) -> Any:
    """A value as it arrives from another stage: nothing of its past is known."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    clock = _clock()
    _wait()
    begin = clock()
    result = call()
    _wait()
    return clock() - begin, result


def _clock() -> Callable[[], float]:
    """One thread's work is what it computes, whoever else uses the machine; more of them are timed by the wall."""
    alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
    return time.process_time if alone else time.perf_counter


def _wait() -> None:
    """What was started on an accelerator is done only when it says so."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
