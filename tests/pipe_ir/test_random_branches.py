"""Layer dropout that is switched off is no data-dependent branch; switched on it is refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import TraceError, pipeline
from pipecut.pipe_ir.tracing.run import FoldCertainRandomBranches


@pytest.mark.parametrize(
    ("compare", "bound", "answer"),
    [
        (operator.lt, 0.0, False), (operator.lt, 1.0, True), (operator.le, -0.1, False), (operator.le, 1, True),
        (operator.gt, -1, True), (operator.gt, 1.0, False), (operator.ge, 0, True), (operator.ge, 1.0, False),
        (torch.lt, 0.0, False), (torch.ge, 0.0, True),
    ],
)  # fmt: skip
def test_certain(compare: Any, bound: float, answer: bool) -> None:
    with FoldCertainRandomBranches():
        for _ in range(5):
            assert bool(compare(torch.rand([]), bound)) is answer
    assert compare(torch.tensor(0.5), bound).item() is answer  # the real comparison says the same


@pytest.mark.parametrize("bound", [0.5, 1e-9])
def test_uncertain_ones_are_left_alone(bound: float) -> None:
    torch.manual_seed(0)
    expected = [bool(torch.rand([]) < bound) for _ in range(20)]
    torch.manual_seed(0)
    with FoldCertainRandomBranches():
        assert [bool(torch.rand([]) < bound) for _ in range(20)] == expected


def test_only_single_random_numbers_are_known() -> None:
    with FoldCertainRandomBranches():
        assert bool(torch.tensor(-1.0) < 0.0)
        assert not bool((torch.rand(3) < 0.0).any())


class DropsLayers(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.probability:
                continue
            x = layer(x)
        return x


def test_a_model_with_layer_dropout_that_is_off() -> None:
    model, x = DropsLayers(0.0), torch.randn(4, 3)
    torch.testing.assert_close(pipeline(model, (x,), num_stages=2)(x), model(x))


def test_a_model_with_layer_dropout_that_is_on() -> None:
    with pytest.raises(TraceError, match=r"torch.rand\(\[\]\) < self.probability"):
        pipeline(DropsLayers(0.1), (torch.randn(4, 3),), num_stages=2)
