"""Calls of the backward that do not fit are refused, with what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipecut.errors import InputError
from pipecut.stage.backward import StageWeights, full_backward, input_backward, weight_backward
from tests.stage.backward.runs import WAYS, choose_way, forward
from tests.stage.backward.stages import CASES, REENTRANT, floats, linears, stack


def refused(text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        call()


@pytest.mark.parametrize("way", WAYS)
def test_weight_part_twice(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = stack(), floats(6, 8)
    weights = choose_way(way, monkeypatch)(module)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    weight_backward(pending)
    before = module[0].weight.grad.clone()  # type: ignore[index, operator, union-attr]
    refused(
        "the weight gradients of this microbatch were added already: weight_backward() takes what an input_backward() "
        "returned once, and then lets go of it",
        lambda: weight_backward(pending),
    )
    assert torch.equal(module[0].weight.grad, before)  # type: ignore[index, arg-type, union-attr]


@pytest.mark.parametrize("backward", [full_backward, lambda *given: input_backward(*given, ())])
def test_gradients_that_do_not_fit(backward: Callable[..., Any]) -> None:
    module, inputs = stack(), floats(6, 8)
    output = module(inputs)
    refused(
        "there are 2 outputs and 1 gradients for them: give one gradient for each output, None where there is none",
        lambda: backward([output, output], [None], [inputs]),
    )
    refused(
        "output 1 that requires a gradient has shape [6, 8], and its gradient has [6, 1]: "
        "the gradient must have the shape of the output",
        lambda: backward([inputs.detach(), output, output], [None, torch.ones(6, 8), torch.ones(6, 1)], [inputs]),
    )
    refused(
        "a loss of dtype torch.complex64 has no gradient by itself: give it one, or make the loss real",
        lambda: backward([output.to(torch.complex64).sum()], [None], [inputs]),
    )


@pytest.mark.parametrize("backward", [full_backward, lambda *given: input_backward(*given, ())])
def test_inputs_that_are_not_leaves(backward: Callable[..., Any]) -> None:
    module, value = stack(), floats(6, 8) * 2
    refused(
        "input 1 is a result of MulBackward0, not a leaf: "
        "run the stage on value.detach().requires_grad_(), and give that as the input",
        lambda: backward([module(value)], [torch.ones(6, 8)], [3, value]),
    )


@pytest.mark.parametrize("way", ["deferred", "deferred, through autograd"])
def test_an_activation_that_was_changed_since(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = linears(lambda self, value: (self.second(self.first(value)), self.first(value)))()
    weights = choose_way(way, monkeypatch)(module)
    kept: list[torch.Tensor] = []
    module.first.register_forward_hook(lambda _, __, output: kept.append(output))  # type: ignore[union-attr]
    inputs = floats(6, 8)
    _, pending = input_backward(module(inputs), [torch.ones(6, 8)] * 2, [inputs], weights)
    kept[0].detach().add_(1)
    refused(
        "a tensor of shape [6, 8] that AddmmBackward0 saved for a weight gradient was changed in place between "
        "input_backward and weight_backward (version 1, expected 0): change it after weight_backward, or change a copy",
        lambda: weight_backward(pending),
    )


@pytest.mark.parametrize("way", ["deferred", "deferred, through autograd"])
def test_a_weight_that_was_changed_since_though_its_gradient_follows_from_it(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = (case for case in CASES if case.name == "weight norm")
    module = case.module()
    weights = choose_way(way, monkeypatch)(module)
    batch = forward(case, module, 0)
    _, pending = input_backward(batch.outputs, batch.gradients, batch.inputs, weights)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weight_backward(pending)


@pytest.mark.parametrize("listener", ["a hook", "unknown"])
def test_reentrant_checkpoints_while_somebody_may_listen(listener: str) -> None:
    module = REENTRANT.module()
    weights = StageWeights(module.parameters()) if listener == "a hook" else module.parameters()
    if listener == "a hook":
        module.first.weight.register_hook(lambda gradient: None)  # type: ignore[operator, union-attr]
    batch = forward(REENTRANT, module, 0)
    refused(
        "a stage with checkpoint(..., use_reentrant=True) cannot be split into input_backward and weight_backward "
        "while somebody may listen to its parameters' gradients (hooks, DistributedDataParallel, fully_shard), for it "
        "adds them all at once. Use use_reentrant=False; or, if nobody listens, pass as parameters "
        "StageWeights(module.parameters()), made before the forward",
        lambda: input_backward(batch.outputs, batch.gradients, batch.inputs, weights),
    )
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_graph_that_was_used_already() -> None:
    """torch itself says what is wrong."""
    module, inputs = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), floats(6, 8)
    output = module(inputs)
    weights = StageWeights(module.parameters())
    full_backward([output], [torch.ones(6, 8)], [inputs])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        input_backward([output], [torch.ones(6, 8)], [inputs], weights)
    assert torch.equal(module[0].bias.grad, module[0].bias.grad)  # type: ignore[arg-type]
