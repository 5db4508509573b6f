"""A graph that is like one before is not searched again; one that differs in anything is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut.stage.backward import StageWeights, deferral, full_backward, input_backward, weight_backward
from tests.stage.backward.runs import assert_same_gradients, choose_way, copied, gradients_of
from tests.stage.backward.stages import floats


class Switched(nn.Module):
    """Layers that a forward uses in one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.way: Callable[[Any, Tensor], Tensor] = Switched.usual

    def forward(self, value: Tensor) -> Tensor:
        return self.way(self, value)

    def usual(self, value: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(value))))) + value

    def other_kind(self, value: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.first(value))))) + value

    def other_weight(self, value: Tensor) -> Tensor:
        return self.second(torch.relu(self.third(torch.relu(self.first(value))))) + value

    def one_weight_twice(self, value: Tensor) -> Tensor:
        return self.third(torch.relu(self.first(torch.relu(self.first(value))))) + value

    def other_edge(self, value: Tensor) -> Tensor:
        return value + self.third(torch.relu(self.second(torch.relu(self.first(value)))))

    def shared_value(self, value: Tensor) -> Tensor:
        inner = torch.relu(self.first(value))
        return self.third(torch.relu(self.second(inner))) + inner

    def frozen(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            value = self.first(value) * 0 + value
        return self.usual(value)

    def scaled(self, value: Tensor) -> Tensor:
        inner = torch.addmm(self.first.bias, value, self.first.weight.t(), alpha=3)
        return self.third(torch.relu(self.second(torch.relu(inner)))) + value

    def hooked(self, value: Tensor) -> Tensor:
        inner = self.first(value)
        inner.register_hook(lambda gradient: gradient * 2)
        return self.third(torch.relu(self.second(torch.relu(inner)))) + value


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each graph that was searched."""
    counted: list[int] = []
    walk = deferral.Graph.__init__

    def counting(self: deferral.Graph, *args: Any) -> None:
        counted.append(1)
        walk(self, *args)

    monkeypatch.setattr(deferral.Graph, "__init__", counting)
    return counted


def check(module: nn.Module, weights: StageWeights, rows: int = 6) -> None:
    """One more microbatch has the gradients of a full backward."""
    theirs, inputs = copied(module), floats(rows, 8)
    own = inputs.detach().requires_grad_()
    expected = full_backward([theirs(own)], [torch.ones(rows, 8)], [own])
    gradients, pending = input_backward([module(inputs)], [torch.ones(rows, 8)], [inputs], weights)
    weight_backward(pending)
    assert_same_gradients("", {"input": gradients[0]}, {"input": expected[0]}, exact=True)
    assert_same_gradients("", gradients_of(module), gradients_of(theirs), exact=True)


def test_equal_graphs_are_searched_once(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = Switched()
    weights = choose_way("deferred", monkeypatch)(module)
    for _ in range(4):
        check(module, weights)
    assert len(searches) == 1
    weights.refresh()  # another step
    check(module, weights)
    assert len(searches) == 1
    check(module, weights, rows=5)
    check(module, weights, rows=6)
    assert len(searches) == 2


WAYS_TO_RUN = [
    way for name, way in vars(Switched).items() if callable(way) and name not in ("__init__", "forward", "usual")
]


@pytest.mark.parametrize("way", WAYS_TO_RUN, ids=lambda way: way.__name__)
def test_another_graph_has_its_own_gradients(
    way: Callable[[Any, Tensor], Tensor], searches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Switched()
    weights = choose_way("deferred", monkeypatch)(module)
    check(module, weights)
    module.way = way
    check(module, weights)
    module.way = Switched.usual
    check(module, weights)
    is_same_graph = way in (Switched.frozen, Switched.scaled)  # to a search; scaled in its options only
    assert is_same_graph or len(searches) > 1


def test_a_hook_on_a_transposed_weight_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a value may be older than the step, and the hook on it too."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.flipped = self.weight.t()
            self.flipped.register_hook(lambda gradient: gradient * 2)

        def forward(self, value: Tensor) -> Tensor:
            return value @ self.flipped

    module = Cached()
    weights = choose_way("deferred", monkeypatch)(module)
    for _ in range(2):
        module.weight.grad = torch.zeros(8, 8)
        inputs = floats(6, 8)
        _, pending = input_backward([module(inputs)], [torch.ones(6, 8)], [inputs], weights)
        weight_backward(pending)
        torch.testing.assert_close(module.weight.grad, 2 * torch.ones(8, 6) @ inputs.detach())
