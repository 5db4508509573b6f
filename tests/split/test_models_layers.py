"""Layers with a life of their own: recurrent ones, dropout, weight norm, spectral norm, parametrizations, pruning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from pipecut import SplitPoint, pipe_split
from tests.support.equality import assert_equals_uncut
from tests.support.sampling import sampled

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first = kind(8, 6, batch_first=True, bidirectional=True)
        self.second = kind(12, 5, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        x, state = self.first(x)
        x, _ = self.second(x)
        return self.head(x[:, -1]), state


@pytest.mark.parametrize(
    ("kind", "path"), sampled([(nn.LSTM, "second"), (nn.GRU, "head"), (nn.RNN, "head")], lambda case: case[0] is nn.RNN)
)
def test_recurrent_layers_are_cut_between(kind: type[nn.RNNBase], path: str) -> None:
    args = (torch.randn(3, 4, 8, requires_grad=True),)
    assert_equals_uncut(Recurrent(kind), args, split_spec={path: BEGINNING}, expect_stages=2)


class StateAcrossTheCut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.a(x)
        pipe_split()
        x, (hidden, memory) = self.b(x, state)
        return self.cell(x[:, 0], (hidden[0], memory[0]))[0]


def test_the_state_of_a_recurrent_layer_crosses_a_cut() -> None:
    assert_equals_uncut(StateAcrossTheCut(), (torch.randn(3, 4, 8),), expect_stages=2)


def test_dropout_draws_the_same_numbers() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.AlphaDropout(0.2)) for _ in range(3)))
    spec = {"1": BEGINNING, "2.1": END}
    assert_equals_uncut(model, (torch.randn(3, 8),), split_spec=spec, expect_stages=3, seed=7)


class NoiseInTheCutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + torch.randn_like(x)
        torch.rand(2)  # unused, and yet it moves the generator on
        pipe_split()
        keep = torch.rand(x.shape[0], 1) > 0.5
        return self.b(x * keep + torch.randn(x.shape[0], 8))


def test_random_numbers_of_the_cut_forward_are_the_same() -> None:
    others = [((torch.randn(6, 8),), {})]
    assert_equals_uncut(NoiseInTheCutForward(), (torch.randn(3, 8),), expect_stages=2, other_calls=others, seed=3)


def old_weight_norm(linear: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(linear)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric(linear: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() * self.bound


def stacked(linear: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(symmetric(linear), "weight", Bounded())
    return linear


def pruned(linear: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(linear, "weight", amount=0.5)


@pytest.mark.parametrize(
    "reshaped",
    [old_weight_norm, torch.nn.utils.spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm,
     parametrizations.orthogonal, symmetric, stacked, pruned],
    ids=["old weight_norm", "old spectral_norm", "weight_norm", "spectral_norm", "orthogonal", "own", "two", "pruned"],
)  # fmt: skip
@pytest.mark.parametrize("training", sampled([True, False], bool), ids=["train", "eval"])
def test_computed_weights_stay_computed(reshaped: Callable[[nn.Linear], nn.Module], training: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(reshaped(nn.Linear(8, 8)), nn.Tanh()) for _ in range(2))).train(training)
    assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={"1": BEGINNING}, expect_stages=2)


class ComputedWeightInTheCutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parametrizations.weight_norm(nn.Linear(8, 8)), symmetric(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.a.weight
        pipe_split()
        return self.b(x) @ self.a.weight + self.b.weight.sum()


def test_the_cut_forward_reads_computed_weights() -> None:
    pipe = assert_equals_uncut(ComputedWeightInTheCutForward(), (torch.randn(3, 8),), expect_stages=2)
    names = {name for tie in pipe.tied_parameters for name in tie.names}
    assert names == {"a.parametrizations.weight.original0", "a.parametrizations.weight.original1"}
