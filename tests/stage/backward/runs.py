"""Backwards of several microbatches of one stage, by torch and in parts, and how they are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut.stage.backward import (
    PendingWeights,
    StageWeights,
    backward,
    full_backward,
    input_backward,
    nodes,
    weight_backward,
)
from tests.stage.backward.stages import CASES, StageCase

MICROBATCHES = 3
# What `parameters` may be, and the way to the weight gradients that is to be taken then.
WAYS = ("at once", "deferred", "through autograd", "deferred, through autograd")
CASES_AND_WAYS = [(case, way) for case in CASES for way in WAYS]
Weights = Callable[[nn.Module], Any]


def is_quick(pair: tuple[StageCase, str]) -> bool:
    """Choose one way for all cases, and every other way for some of them."""
    case, way = pair
    return way == "deferred" or way == WAYS[CASES.index(case) % len(WAYS)]


def choose_way(way: str, monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Take one way whatever the sizes are; what it returns makes the argument for `parameters`."""
    deferred = way.startswith("deferred")
    monkeypatch.setattr(StageWeights, "is_worth_deferring", lambda *_: deferred)
    monkeypatch.setattr(backward, "min_work_to_defer", lambda *_: 0 if deferred else float("inf"))
    if way != "deferred, and added while computed":  # which rounds in another way
        monkeypatch.setattr(nodes, "_is_worth_adding", lambda _: False)
    if way.endswith("through autograd"):
        return lambda module: module.parameters()
    return lambda module: StageWeights(module.parameters())


@dataclass
class Microbatch:
    """What goes in, what comes out, and what comes back."""

    inputs: list[Any]
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    input_gradients: Sequence[Tensor | None] = ()
    pending: list[PendingWeights] = field(default_factory=list)


def forward(case: StageCase, module: nn.Module, seed: int) -> Microbatch:
    """The same numbers for the same case and seed."""
    torch.manual_seed(seed)
    inputs = list(case.inputs())
    result = module(*inputs)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    gradients = [torch.randn_like(output) if output.requires_grad else None for output in outputs]
    return Microbatch(inputs, outputs, gradients)


def run_torch(case: StageCase, module: nn.Module, order: Sequence[int]) -> list[Microbatch]:
    """torch's backward of each microbatch, in the order in which the weight gradients are added."""
    batches = [forward(case, module, seed) for seed in range(MICROBATCHES)]
    for number in order:
        torch_backward(batches[number])
    return batches


def torch_backward(batch: Microbatch) -> None:
    """One backward without a line of ours."""
    pairs = [pair for pair in zip(batch.outputs, batch.gradients, strict=True) if pair[1] is not None]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
    batch.input_gradients = [value.grad if isinstance(value, Tensor) else None for value in batch.inputs]


def run_parts(case: StageCase, module: nn.Module, weights: Any, order: str) -> tuple[list[Microbatch], list[int]]:
    """The same by steps, and the order in which they added weight gradients.

    I1 and W1 are the parts of microbatch 1, B1 is all of it. Either part adds weight gradients, and the other none.
    """
    batches = [forward(case, module, seed) for seed in range(MICROBATCHES)]
    added: list[int] = []
    for step in order.split():
        number, before = int(step[1]), gradients_of(module)
        is_done = number in added
        run_step(step[0], batches[number], weights)
        adds_now = step[0] != "I" or batches[number].pending[0].is_empty
        if adds_now and not is_done:
            added.append(number)
        else:
            assert_same_gradients(f" after {step}", gradients_of(module), before, exact=True)
    return batches, added


def run_step(operation: str, batch: Microbatch, weights: Any) -> None:
    """I, W or B of one microbatch."""
    if operation == "B":
        batch.input_gradients = full_backward(batch.outputs, batch.gradients, batch.inputs)
    elif operation == "I":
        batch.input_gradients, pending = input_backward(batch.outputs, batch.gradients, batch.inputs, weights)
        batch.pending.append(pending)
        batch.outputs, batch.gradients = [], []  # the weight part has to live without them
    else:
        weight_backward(batch.pending.pop())


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A copy of each parameter's grad, by name."""
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: None if gradient is None else gradient.detach().clone() for name, gradient in named.items()}


def copied(module: nn.Module) -> nn.Module:
    """A deep copy, with the gradients that deepcopy() leaves out."""
    made = copy.deepcopy(module)
    for mine, theirs in zip(module.parameters(), made.parameters(), strict=True):
        theirs.grad = copy.deepcopy(mine.grad)
    return made


def with_gradients(module: nn.Module) -> nn.Module:
    """The module, each parameter with a grad already."""
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    return module


def assert_equals_torch(case: StageCase, module: nn.Module, weights: Any, order: str) -> None:
    """The parts, in this order, give every gradient that torch's backward gives on a copy of the module."""
    theirs = copied(module)
    actual, added = run_parts(case, module, weights, order)
    expected = run_torch(case, theirs, added)
    for number, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        places = range(len(mine.inputs))
        assert_same_gradients(
            f" of microbatch {number}",
            {f"input {place}": mine.input_gradients[place] for place in places if mine.input_gradients},
            {f"input {place}": other.input_gradients[place] for place in places if other.input_gradients},
            case.exact,
        )
    assert_same_gradients("", gradients_of(module), gradients_of(theirs), case.exact)


def assert_same_gradients(
    where: str, actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], exact: bool
) -> None:
    """The same gradients under the same names, laid out in the same way; to the bit if exact."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        if got is None or wanted is None:
            assert got is wanted, f"{name}{where}: {got} instead of {wanted}"
            continue
        assert (got.layout, got.dtype, got.shape) == (wanted.layout, wanted.dtype, wanted.shape), f"{name}{where}"
        if got.is_sparse:
            got, wanted = got.to_dense(), wanted.to_dense()
        assert got.stride() == wanted.stride(), f"{name}{where}"
        error = 0.0 if exact else 1e-5
        torch.testing.assert_close(
            got, wanted, rtol=error, atol=error, msg=lambda text, name=name: f"{name}{where}: {text}"
        )
