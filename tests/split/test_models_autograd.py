"""Gradients that are not plain: custom autograd functions, no_grad and autocast regions, frozen parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split
from tests.support.equality import assert_equals_uncut

BEGINNING = SplitPoint.BEGINNING


class TripledGradient(torch.autograd.Function):
    """The backward is wrong on purpose: a cut model that loses it gives other gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor * 3, None


class SavingPair(torch.autograd.Function):
    """Two inputs, two results, saved tensors, and a backward with a sign of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return -(product * y) + total, product * x - 2 * total


tripled = TripledGradient.apply


class FunctionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        product, total = SavingPair.apply(self.linear(x), x)
        return tripled(product, 0.5) + total


def test_a_custom_function_inside_a_block_keeps_its_backward() -> None:
    model = nn.Sequential(FunctionBlock(), FunctionBlock())
    assert_equals_uncut(model, (torch.randn(3, 8, requires_grad=True),), split_spec={"1": BEGINNING}, expect_stages=2)


class FunctionInTheCutForward(nn.Module):
    def __init__(self, *, by_global: bool) -> None:
        super().__init__()
        self.by_global = by_global
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = tripled(x, 0.5) if self.by_global else TripledGradient.apply(x, 0.5)
        pipe_split()
        product, total = SavingPair.apply(x, self.b(x))
        return product - total.relu()


@pytest.mark.parametrize("by_global", [False, True], ids=["by its class", "kept in a global"])
def test_a_custom_function_in_the_cut_forward_keeps_its_backward(by_global: bool) -> None:
    args = (torch.randn(3, 8, requires_grad=True),)
    assert_equals_uncut(FunctionInTheCutForward(by_global=by_global), args, expect_stages=2)


class WithoutGradient(nn.Module):
    """no_grad around a whole module, around operations in a block, or in the forward that is cut."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.a, self.b, self.c = nn.Linear(8, 8), OperationsWithoutGradient(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "module":
            with torch.no_grad():
                x = self.a(x)
        else:
            x = self.a(x)
        if self.where == "cut forward":
            with torch.no_grad():
                scale = (x * x).mean(-1, keepdim=True)
                scale = scale.sqrt()
            x = x / scale
        pipe_split()
        if self.where == "both sides":
            with torch.no_grad():
                shift = x.mean(0) * self.c.weight.sum()
            x = x + shift
        return self.c(self.b(x) if self.where == "block" else x)


class OperationsWithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.linear(x).tanh()
        return self.linear(x) * target


@pytest.mark.parametrize("where", ["module", "block", "cut forward", "both sides"])
def test_no_grad_blocks_block_gradients(where: str) -> None:
    assert_equals_uncut(WithoutGradient(where), (torch.randn(3, 8, requires_grad=True),), expect_stages=2)


@torch.no_grad()
def running_scale(x: Tensor) -> Tensor:
    return x.abs().max()


class MoreModes(nn.Module):
    """A decorated function, enable_grad inside no_grad, and detach."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) / running_scale(x)
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = self.b(y)
            y = y + 1
        pipe_split()
        return self.c(z) + y + x.detach() * x


def test_grad_modes_nest_and_values_without_gradient_cross_a_cut() -> None:
    pipe = assert_equals_uncut(MoreModes(), (torch.randn(3, 8),), expect_stages=2)
    assert sorted(edge.spec.requires_grad for edge in pipe.edges) == [False, True, True]


class Autocast(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.a, self.block, self.c = nn.Linear(8, 8), AutocastBlock(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "module":
            with torch.autocast("cpu", torch.bfloat16):
                x = self.a(x)
        elif self.where == "cut forward":
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.softmax(x @ self.a.weight, -1) @ self.a.weight
        else:
            x = self.a(x)
        pipe_split()
        x = self.block(x.float()) if self.where == "block" else x.float()
        return self.c(x.float())


class AutocastBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                y = y + self.linear(x.float())
            return self.linear(y)


@pytest.mark.parametrize("where", ["module", "block", "cut forward"])
def test_autocast_blocks_compute_in_their_dtype(where: str) -> None:
    pipe = assert_equals_uncut(Autocast(where), (torch.randn(3, 8, requires_grad=True),), expect_stages=2)
    (edge,) = pipe.edges
    assert edge.spec.dtype == (torch.float32 if where == "block" else torch.bfloat16)


@pytest.mark.parametrize("frozen", ["0", "2", "1"], ids=["first part", "last part", "middle"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    model.get_submodule(frozen).requires_grad_(False)
    pipe = assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={"1": BEGINNING, "2": BEGINNING})
    assert [edge.spec.requires_grad for edge in pipe.edges] == [frozen != "0", True]


def test_a_model_that_is_frozen_as_a_whole_still_gives_its_input_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    assert_equals_uncut(model, (torch.randn(3, 8, requires_grad=True),), split_spec={"1": BEGINNING})


class NotDifferentiable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.table = nn.Linear(8, 5), nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        choice = self.a(x).argmax(-1)
        scale = self.a(x).sign().mean(-1, keepdim=True)
        pipe_split()
        return self.table(choice) * scale, choice


def test_whole_numbers_cross_a_cut_without_gradient() -> None:
    pipe = assert_equals_uncut(NotDifferentiable(), (torch.randn(3, 8),), expect_stages=2)
    assert {edge.spec.dtype for edge in pipe.edges} == {torch.int64, torch.float32}
