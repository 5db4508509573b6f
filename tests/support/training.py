"""A cut model trained beside the uncut one: what a step gives, and whether it is what one device would give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipecut.run.schedule import PipelineSchedule
from tests.support.nested_values import assert_same, tensors_in

LossFunction = Callable[..., Tensor]
Gradients = dict[str, Tensor | None]

# Double precision, and sums in another order: what is larger than this is a mistake.
TIGHT = 1e-10


@dataclass(frozen=True)
class Problem:
    """A model, a batch and a loss."""

    model: nn.Module
    args: tuple[Any, ...]
    target: Any
    loss_fn: LossFunction
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a forward and backward of the whole batch gave."""

    output: Any
    loss: float
    gradients: Gradients
    input_gradients: list[Tensor | None]


def uncut_step(problem: Problem, times: int = 1) -> Result:
    """`loss_fn(model(x), y).backward()` on one device, with a copy of the model and of the batch."""
    model = copy.deepcopy(problem.model)
    model.zero_grad(set_to_none=True)
    args, kwargs = _own_leaves((problem.args, dict(problem.kwargs)))
    for _ in range(times):
        output = model(*args, **kwargs)
        loss = problem.loss_fn(output, problem.target)
        loss.backward()
    inputs = [tensor.grad for tensor in tensors_in((args, kwargs))]
    return Result(output, loss.item(), gradients_of(model), inputs)


def uncut_eval(problem: Problem) -> Any:
    """The model's output on the whole batch."""
    with torch.no_grad():
        return copy.deepcopy(problem.model)(*problem.args, **problem.kwargs)


def cut_step(schedule: PipelineSchedule, problem: Problem, times: int = 1) -> Result:
    """The same by a schedule whose stages share the parameters of the problem's model."""
    problem.model.zero_grad(set_to_none=True)
    args, kwargs = _own_leaves((problem.args, dict(problem.kwargs)))
    for _ in range(times):
        output = schedule.step(*args, target=problem.target, **kwargs)
    inputs = [tensor.grad for tensor in tensors_in((args, kwargs))]
    return Result(output, schedule.mean_loss(), gradients_of(problem.model), inputs)


def _own_leaves(call: Any) -> Any:
    memo = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_in(call)}
    return copy.deepcopy(call, memo)


def gradients_of(model: nn.Module) -> Gradients:
    """Every parameter's gradient under each of its names."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def assert_trains_as_uncut(
    schedule: PipelineSchedule, problem: Problem, times: int = 1, within: float = TIGHT
) -> Result:
    """A step, or several that add up, against the uncut model: output, loss, gradients of parameters and inputs."""
    expected = uncut_step(problem, times)
    actual = cut_step(schedule, problem, times)
    assert abs(actual.loss - expected.loss) <= within * max(1.0, abs(expected.loss))
    assert_same_gradients(actual.gradients, expected.gradients, within)
    assert_same_gradients(by_place(actual.input_gradients), by_place(expected.input_gradients), within)
    assert_same(actual.output, _detached(expected.output), "output", within)
    return actual


def assert_evaluates_as_uncut(schedule: PipelineSchedule, problem: Problem, within: float = TIGHT) -> None:
    """An evaluation against the uncut model: the output, and no gradient changes."""
    before = gradients_of(problem.model)
    output = schedule.eval(*problem.args, target=problem.target, **problem.kwargs)
    expected = uncut_eval(problem)
    assert_same(output, expected, "output of eval", within)
    assert_same_gradients(gradients_of(problem.model), before, 0.0)
    expected_loss = problem.loss_fn(expected, problem.target).item()
    assert abs(schedule.mean_loss() - expected_loss) <= within * max(1.0, abs(expected_loss))


def assert_same_gradients(actual: Gradients, expected: Gradients, within: float) -> None:
    """All of them, by name; one that is None must be None."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        mine = actual[name]
        assert (mine is None) == (gradient is None), f"the gradient of {name} is {mine}, and should be {gradient}"
        if mine is not None and gradient is not None:
            close = torch.allclose(mine, gradient, rtol=within, atol=within, equal_nan=True)
            worst = (mine - gradient).abs().max().item() if mine.shape == gradient.shape else mine.shape
            assert close, f"the gradient of {name} is wrong by {worst}"


def by_place(gradients: list[Tensor | None]) -> Gradients:
    """Gradients of inputs, under names."""
    return {f"input {place}": gradient for place, gradient in enumerate(gradients)}


def _detached(value: Any) -> Any:
    return copy.deepcopy(value, {id(tensor): tensor.detach() for tensor in tensors_in(value)})
