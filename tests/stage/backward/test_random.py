"""Random stages: weights used in any number of places and made from each other, values joined in any way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.stage.backward.runs import WAYS, assert_equals_torch, choose_way, with_gradients
from tests.stage.backward.stages import StageCase, floats
from tests.support.properties import examples

SIZE = 4
WEIGHTS = 3

# An operation takes two values, or a value and a weight, or two weights, and makes another value or weight.
VALUE_AND_WEIGHT: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda value, weight: value @ weight,
    lambda value, weight: value @ weight.t(),
    lambda value, weight: torch.addmm(weight[0], value, weight, alpha=0.5),
    lambda value, weight: (weight @ value.t()).t(),
    lambda value, weight: torch.einsum("bi,ij->bj", value, weight),
    lambda value, weight: value * weight[0],
    lambda value, weight: value + weight.sum(0),
    lambda value, weight: torch.bmm(value.view(2, -1, SIZE), weight.expand(2, SIZE, SIZE)).view(-1, SIZE),
]
TWO_VALUES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda one, other: one + other,
    lambda one, other: one * other.tanh(),
    lambda one, other: one @ (other.t() @ one) / 8,
    lambda one, other: torch.cat([one[:, :2], other[:, 2:]], 1),
    lambda one, other: one.sigmoid() - other.split(2, 1)[0].repeat(1, 2),
    lambda one, other: one.clone().add_(other).relu_(),
]
TWO_WEIGHTS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda one, other: one + other,
    lambda one, other: one @ other / 2,
    lambda one, other: one.t(),
    lambda one, other: torch.cat([one[:2], other[2:]]),
]
KINDS = {"value and weight": VALUE_AND_WEIGHT, "two values": TWO_VALUES, "two weights": TWO_WEIGHTS}
Step = tuple[str, int, int, int]

numbers = st.integers(0, 63)
programs = st.lists(st.tuples(st.sampled_from(list(KINDS)), numbers, numbers, numbers), min_size=1, max_size=12)


class Program(nn.Module):
    """Runs steps over growing lists of values and weights."""

    def __init__(self, steps: Sequence[Step], outputs: int) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        weights = (torch.randn(SIZE, SIZE, dtype=torch.float64) for _ in range(WEIGHTS))
        self.weights = nn.ParameterList(map(nn.Parameter, weights))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        values, weights = list(inputs), list(self.weights)
        for kind, which, first, second in self.steps:
            operations = KINDS[kind]
            one = (weights if kind == "two weights" else values)[-1 - first % 3]
            other = (values if kind == "two values" else weights)[-1 - second % 3]
            (weights if kind == "two weights" else values).append(operations[which % len(operations)](one, other))
        return values[-self.outputs :]


@pytest.mark.parametrize("way", WAYS)
@given(steps=programs, outputs=st.integers(1, 3), trained=st.integers(0, 2**WEIGHTS - 1), seed=numbers)
@settings(max_examples=examples(15))
def test_random_stages(way: str, steps: list[Step], outputs: int, trained: int, seed: int) -> None:
    torch.manual_seed(seed)
    module = Program(steps, outputs)
    for number, weight in enumerate(module.weights):
        weight.requires_grad_(bool(trained >> number & 1))
    inputs = (
        floats(2, SIZE, dtype=torch.float64),
        torch.randn(2, SIZE, dtype=torch.float64),
        floats(2, SIZE, dtype=torch.float64),
    )
    case = StageCase(
        "random",
        lambda: module,
        lambda: tuple(value.detach().requires_grad_(value.requires_grad) for value in inputs),
        exact=False,
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        weights_of = choose_way(way, monkeypatch)
        if seed % 2:
            with_gradients(module)
        assert_equals_torch(case, module, weights_of(module), "I2 I0 W0 B1 W2")
