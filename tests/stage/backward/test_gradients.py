"""The backward of a stage, in full and in two parts, gives the gradients of torch's own backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipecut.stage.backward import StageWeights, full_backward, input_backward, weight_backward
from tests.stage.backward.runs import (
    CASES_AND_WAYS,
    WAYS,
    assert_equals_torch,
    assert_same_gradients,
    choose_way,
    gradients_of,
    is_quick,
    with_gradients,
)
from tests.stage.backward.stages import CASES, PRODUCTS, REENTRANT, StageCase, floats, linears, rows, stack
from tests.support.sampling import sampled

# How the parts of three microbatches follow each other.
ORDERS = (
    "I0 W0 I1 W1 I2 W2",
    "I0 I1 I2 W0 W1 W2",
    "I0 I1 I2 W2 W1 W0",
    "I2 I0 W0 I1 W2 W1",
    "I1 B0 W1 I2 W2",
)


@pytest.mark.parametrize(("case", "way"), sampled(CASES_AND_WAYS, is_quick), ids=str)
def test_parts_give_what_torch_gives(case: StageCase, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_of = choose_way(way, monkeypatch)
    module = case.module()
    assert_equals_torch(case, module, weights_of(module), "I2 I0 W0 I1 W2 W1")
    module = with_gradients(case.module())
    assert_equals_torch(case, module, weights_of(module), "I1 B0 W1 I2 W2")


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_may_be_added_while_they_are_computed(case: StageCase, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_of = choose_way("deferred, and added while computed", monkeypatch)
    module = with_gradients(case.module())
    assert_equals_torch(replace(case, exact=False), module, weights_of(module), "I1 B0 W1 I2 W2")


@pytest.mark.parametrize("case", [*CASES, REENTRANT], ids=str)
def test_full_gives_what_torch_gives(case: StageCase) -> None:
    assert_equals_torch(case, case.module(), None, "B0 B2 B1")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [case for case in CASES if "transformer" in case.name or "tied" in case.name], ids=str)
def test_parts_may_come_in_any_order(case: StageCase, way: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case.module()
    assert_equals_torch(case, module, choose_way(way, monkeypatch)(module), order)


@pytest.mark.parametrize("way", ["at once", "deferred"])
@pytest.mark.parametrize("order", ORDERS)
def test_reentrant_checkpoints(way: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_gradients(REENTRANT.module())
    assert_equals_torch(REENTRANT, module, choose_way(way, monkeypatch)(module), order)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_stages(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled is one operation of the graph, and runs as a whole in the input part."""
    module = torch.compile(stack(), backend="aot_eager")
    assert isinstance(module, nn.Module)
    case = StageCase("compiled", stack, rows)
    assert_equals_torch(case, module, choose_way(way, monkeypatch)(module), "I1 B0 W1 I2 W2")


@pytest.mark.parametrize("way", WAYS)
def test_autocast_over_all_microbatches(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside one autocast the cast of a weight is made once: the graphs of all microbatches share it."""
    module = stack()
    case = StageCase("autocast", stack, rows)
    weights = choose_way(way, monkeypatch)(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equals_torch(case, module, weights, "I0 I1 W0 W1 I2 W2")


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_another_dtype(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def accumulates_in_single_precision() -> nn.Module:
        module = nn.Linear(8, 8, dtype=torch.bfloat16)
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
            parameter.grad = torch.randn(parameter.shape)
        return module

    inputs = floats(6, 8, dtype=torch.bfloat16)
    theirs, mine = accumulates_in_single_precision(), accumulates_in_single_precision()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        one.data, one.grad = other.data.clone(), other.grad.clone()  # type: ignore[union-attr]
    weights = choose_way(way, monkeypatch)(mine)
    theirs(inputs).sum().backward()
    _, pending = input_backward([mine(inputs).sum()], [None], [inputs], weights)
    weight_backward(pending)
    assert mine.bias.grad is not None
    assert mine.bias.grad.dtype == torch.float32
    assert_same_gradients("", gradients_of(mine), gradients_of(theirs), exact=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sparse", "part of a graph"])
def test_existing_gradients_of_another_kind(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, theirs = nn.Linear(8, 8), nn.Linear(8, 8)
    theirs.load_state_dict(module.state_dict())
    for parameter in (*module.parameters(), *theirs.parameters()):
        existing = torch.ones_like(parameter)
        parameter.grad = existing.to_sparse() if kind == "sparse" else (existing.requires_grad_() * 2)
    inputs = floats(6, 8)
    weights = choose_way(way, monkeypatch)(module)
    theirs(inputs).sum().backward()
    _, pending = input_backward([module(inputs).sum()], [None], [inputs], weights)
    weight_backward(pending)
    assert_same_gradients("", gradients_of(module), gradients_of(theirs), exact=True)


@pytest.mark.parametrize("way", WAYS)
def test_devices_other_than_the_cpu(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device: nothing is computed, but everything goes the way that it goes on an accelerator."""
    module = stack().to("meta")
    weights = choose_way(way, monkeypatch)(module)
    inputs = torch.randn(6, 8, device="meta", requires_grad=True)
    output = module(inputs)
    (gradient,), pending = input_backward([output], [torch.ones_like(output)], [inputs], weights)
    assert gradient is not None
    assert (gradient.shape, gradient.device.type) == ((6, 8), "meta")
    assert pending.is_empty or [parameter.grad for parameter in module.parameters()] == [None] * 4
    weight_backward(pending)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape, name


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_has_no_gradient_of_its_own(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, theirs = nn.Linear(8, 1), nn.Linear(8, 1)
    theirs.load_state_dict(module.state_dict())
    inputs = floats(6, 8)
    weights = choose_way(way, monkeypatch)(module)
    for reduce in (torch.sum, lambda value: value.sum().view(1), lambda value: value[:1]):
        module.zero_grad()
        theirs.zero_grad()
        (gradient,), pending = input_backward([reduce(module(inputs))], [None], [inputs], weights)
        weight_backward(pending)
        reduce(theirs(inputs)).backward()
        assert torch.equal(gradient, inputs.grad)  # type: ignore[arg-type]
        assert_same_gradients("", gradients_of(module), gradients_of(theirs), exact=True)


@pytest.mark.parametrize("way", WAYS)
def test_outputs_without_a_gradient_do_not_take_part(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = linears(lambda self, value: (self.first(value), self.second(value)[:1, :1]))()
    weights = choose_way(way, monkeypatch)(module)
    inputs = floats(6, 8)
    outputs = module(inputs)
    (gradient,), pending = input_backward(outputs, [torch.ones(6, 8), None], [inputs], weights)
    weight_backward(pending)
    assert torch.equal(gradient, torch.ones(6, 8) @ module.first.weight)  # type: ignore[arg-type, operator, union-attr]
    assert module.second.weight.grad is None  # type: ignore[union-attr]
    assert full_backward(module(inputs), [None, None], [inputs]) == (None,)
    nothing, pending = input_backward(module(inputs), [None, None], [inputs], weights)
    weight_backward(pending)
    assert nothing == (None,)
    assert module.second.weight.grad is None  # type: ignore[union-attr]


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_is_not_listed_gets_its_gradient(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = nn.Parameter(torch.randn(8, 8))
    module = linears(lambda self, value: self.first(value) @ elsewhere)()
    weights = choose_way(way, monkeypatch)(module)
    inputs = floats(6, 8)
    _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
    weight_backward(pending)
    assert torch.equal(elsewhere.grad, module.first(inputs).t() @ torch.ones(6, 8))  # type: ignore[arg-type, operator]


def test_input_gradients_are_tensors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is an input passes its gradient on as it is; a buffer for it may be used again."""
    module = linears(lambda self, a, b: (a, a + b, self.first(b).sum()))()
    weights = choose_way("deferred", monkeypatch)(module)
    first, second = floats(6, 8), floats(6, 8)
    given = [torch.ones(6, 8), torch.ones(6, 8), torch.ones(())]
    gradients, _ = input_backward(module(first, second), given, [first, second], weights)
    places = [gradient.data_ptr() for gradient in [*gradients, *given] if isinstance(gradient, Tensor)]
    assert len(set(places)) == 5
    assert all(gradient.is_contiguous() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_the_optimizer_between_the_parts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are those of the forward, whatever becomes of the weights since."""
    module, theirs = stack(), stack()
    theirs.load_state_dict(module.state_dict())
    inputs = floats(6, 8)
    theirs(inputs).sum().backward()
    weights = choose_way(way, monkeypatch)(module)
    _, pending = input_backward([module(inputs).sum()], [None], [inputs], weights)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    weight_backward(pending)
    assert_same_gradients("", gradients_of(module), gradients_of(theirs), exact=True)


def test_sizes_decide_which_way_pays() -> None:
    """A stage of large layers puts weight gradients off by itself; a stage of small ones does not."""
    for width, deferred in ((8, False), (2048, True)):
        module = nn.Linear(width, width)
        weights = StageWeights(module.parameters())
        inputs = floats(64, width)
        _, pending = input_backward([module(inputs)], [torch.ones(64, width)], [inputs], weights)
        assert pending.is_empty is not deferred
