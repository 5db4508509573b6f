"""Layer dropout that is switched off is no data-dependent branch; switched on it is refused."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipecut import SplitError, SplitPoint, TraceError, pipeline
from pipecut.pipe_ir.tracing.branches import AnsweredBranches


@pytest.mark.parametrize(
    ("compare", "bound", "answer"),
    [
        (operator.lt, 0.0, False), (operator.lt, 1.0, True), (operator.le, -0.1, False), (operator.le, 1, True),
        (operator.gt, -1, True), (operator.gt, 1.0, False), (operator.ge, 0, True), (operator.ge, 1.0, False),
        (torch.lt, 0.0, False), (torch.ge, 0.0, True),
    ],
)  # fmt: skip
def test_certain(compare: Any, bound: float, answer: bool) -> None:
    with AnsweredBranches():
        for _ in range(5):
            assert bool(compare(torch.rand([]), bound)) is answer
    assert compare(torch.tensor(0.5), bound).item() is answer  # the real comparison says the same


@pytest.mark.parametrize("bound", [0.5, 1e-9])
def test_uncertain_ones_are_left_alone(bound: float) -> None:
    torch.manual_seed(0)
    expected = [bool(torch.rand([]) < bound) for _ in range(20)]
    torch.manual_seed(0)
    with AnsweredBranches():
        assert [bool(torch.rand([]) < bound) for _ in range(20)] == expected


def test_only_single_random_numbers_are_known() -> None:
    with AnsweredBranches():
        assert bool(torch.tensor(-1.0) < 0.0)
        assert not bool((torch.rand(3) < 0.0).any())


@pytest.mark.parametrize(
    "decide",
    [
        lambda: torch.rand([]).add_(2) >= 1.0,
        lambda: torch.rand([]).mul_(0).sub_(1) < 0.0,
        lambda: (torch.rand([]) < 0.0).logical_not_(),
    ],
)
def test_what_is_written_to_is_not_known_any_more(decide: Callable[[], Tensor]) -> None:
    """The answer for the number as it was drawn was kept: a branch was never taken that uncut always is."""
    with AnsweredBranches():
        assert bool(decide())


def test_arguments_may_be_keywords() -> None:
    with AnsweredBranches():
        assert torch.gt(input=torch.ones(2), other=0).all()
        assert not bool(torch.lt(torch.rand([]), other=0.0))


class DropsLayers(nn.Module):
    def __init__(self, probability: float, draw: Callable[[], Any] = lambda: torch.rand([])) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.probability, self.draw = probability, draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.draw() < self.probability:
                continue
            x = layer(x)
        return x * 2


def test_a_model_with_layer_dropout_that_is_off() -> None:
    model, x = DropsLayers(0.0), torch.randn(4, 3)
    torch.testing.assert_close(pipeline(model, (x,), num_stages=2)(x), model(x))


def test_a_model_with_layer_dropout_that_is_on() -> None:
    with pytest.raises(TraceError, match=r"self.draw\(\) < self.probability"):
        pipeline(DropsLayers(0.1), (torch.randn(4, 3),), num_stages=2)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand([]), r".*: if self.training and self.draw\(\) < self.probability"),
        (lambda: random.randint(0, 0), "those of Python's random"),
        (lambda: np.random.rand(), "those of numpy.random"),
    ],
    ids=["torch", "python", "numpy"],
)
def test_where_every_layer_was_dropped_the_error_says_so(draw: Callable[[], Any], name: str) -> None:
    """The error said that the model has too few modules, or that a container is never called."""
    model, x = DropsLayers(100.0, draw), torch.randn(4, 3)
    left_out = (
        rf"'layers.0', .* of DropsLayers did not run, .* random numbers \({name}.*has left them out; set its prob"
    )
    with pytest.raises(SplitError, match=f"2 stages were asked for(.|\n)*{left_out}"):
        pipeline(model, (x,), num_stages=2)
    with pytest.raises(SplitError, match=f"'layers.2', which did not run.*{left_out}"):
        pipeline(model, (x,), split_spec={"layers.2": SplitPoint.BEGINNING})
