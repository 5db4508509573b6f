"""Names that generated code could trip over: of arguments, modules, parameters, functions and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split
from tests.support.equality import assert_equals_uncut

BEGINNING = SplitPoint.BEGINNING


class OddArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, input: Tensor, device: Tensor, torch: Tensor, batch: Tensor, checkpoint: Tensor, math: Tensor
    ) -> Tensor:
        x = self.a(input) + device * torch
        pipe_split()
        x = x.new_ones(x.shape[0] * 2, 8)[: x.shape[0]] * x
        return self.b(x) * batch + checkpoint - math


def test_arguments_have_the_names_that_generated_code_uses() -> None:
    args = tuple(torch.randn(3, 8) for _ in range(6))
    others = [(tuple(torch.randn(5, 8) for _ in range(6)), {})]
    assert_equals_uncut(OddArguments(), args, expect_stages=2, other_calls=others)


class OddModules(nn.Module):
    """Submodules and parameters under names that are no identifiers, or that Python and nn.Module know as others."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("class", "a-b", "0", "torch", "lambda", "_modules_", "with space"):
            self.add_module(name, nn.Linear(8, 8))
        self.register_parameter("for", nn.Parameter(torch.rand(8)))
        self.register_parameter("x-y", nn.Parameter(torch.rand(8)))
        self.register_buffer("import", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x).tanh()
        return x * getattr(self, "for") + getattr(self, "x-y") * getattr(self, "import")


@pytest.mark.parametrize("path", ["a-b", "lambda"])
def test_modules_and_parameters_have_names_that_are_no_identifiers(path: str) -> None:
    assert_equals_uncut(OddModules(), (torch.randn(3, 8),), split_spec={path: BEGINNING}, expect_stages=2)


class x(torch.autograd.Function):  # noqa: N801
    """A function with the name of a value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


class SameNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mul, self.forward_, self.y = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x_: Tensor, mul: Tensor, mul_1: Tensor) -> Tensor:
        made = x.apply(self.mul(x_)) * mul
        pipe_split()
        made = x.apply(made * mul_1)
        return self.y(self.forward_(made))


def test_functions_values_and_modules_share_names() -> None:
    assert_equals_uncut(SameNames(), tuple(torch.randn(3, 8) for _ in range(3)), expect_stages=2)


class TwoSizes(nn.Module):
    """Two symbolic dims, one of which no tensor at the cut shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        batch, others = x.shape[0], memory.shape[0]
        flat = (self.a(x).unsqueeze(1) + memory).reshape(-1, 4)
        pipe_split()
        return self.b(flat.view(batch, others, 8).mean(1)) * (batch + others)


def test_sizes_that_no_tensor_at_the_cut_shows_are_known_after_it() -> None:
    args = (torch.randn(3, 8), torch.randn(4, 8))
    assert_equals_uncut(TwoSizes(), args, expect_stages=2, other_calls=[((torch.randn(5, 8), torch.randn(2, 8)), {})])
