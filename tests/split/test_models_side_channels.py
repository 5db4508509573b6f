"""Models with habits: side channels, objects of their own, patched forwards, stages that take or give nothing."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecut import SplitPoint, pipe_split
from pipecut.errors import PipeWarning
from tests.support.equality import assert_equals_uncut

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class MiddleTakesNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.prompt = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        prompt = self.b(self.prompt) * torch.arange(8)
        pipe_split()
        return self.c(x + prompt)


def test_a_stage_takes_nothing_from_others() -> None:
    pipe = assert_equals_uncut(MiddleTakesNothing(), (torch.randn(3, 8),), expect_stages=3)
    assert pipe.stage_infos[1].inputs == ()


class FirstGivesNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += self.a(x).mean(0)
        pipe_split()
        return self.b(x)


def test_a_stage_gives_nothing_to_others() -> None:
    pipe = assert_equals_uncut(FirstGivesNothing(), (torch.randn(3, 8),), expect_stages=2)
    assert pipe.stage_infos[0].outputs == ()


class Keeps(nn.Module):
    """Leaves a tensor in an attribute, for others to find."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x).softmax(-1)
        return self.kept * x


class SideChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Keeps(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(self.a(x))
        return y, self.a.kept * 2


@pytest.mark.parametrize("path", ["b", "a.linear"])
def test_a_tensor_left_in_an_attribute_is_found_in_a_later_stage(path: str) -> None:
    with pytest.warns(PipeWarning, match=r"the forward of 'a' sets self\.kept, and is cut"):
        assert_equals_uncut(SideChannel(), (torch.randn(3, 8),), split_spec={path: END if path != "b" else BEGINNING})


class Shared:
    """Neither a dataclass nor anything else that can be opened."""

    def __init__(self, x: Tensor, scale: float) -> None:
        self.x, self.scale = x, scale


class ReturnsObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, shared: Shared) -> Shared:
        return Shared(self.linear(shared.x) * shared.scale, 0.5)


class PassesObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = ReturnsObject(), ReturnsObject(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(Shared(x, 2.0))).x)


@pytest.mark.parametrize("path", ["b", "c", "b.linear"])
def test_modules_pass_objects_of_a_class_of_their_own(path: str) -> None:
    assert_equals_uncut(PassesObjects(), (torch.randn(3, 8),), split_spec={path: BEGINNING}, expect_stages=2)


def doubled(self: nn.Module, x: Tensor) -> Tensor:
    return nn.Sequential.forward(self, x) * 2


@pytest.mark.parametrize("path", ["1", "1.1", "0.1"])
def test_a_forward_that_was_replaced_on_the_object_is_the_one_that_counts(path: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    for block in model:
        block.forward = types.MethodType(doubled, block)
    assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={path: BEGINNING}, expect_stages=2)


class TakesModule(nn.Module):
    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return module(x).sin()


class PassesModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(8, 8), nn.Linear(8, 8), TakesModule()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.b, self.run(self.a, x))


@pytest.mark.parametrize("path", ["run#1", "b"])
def test_a_module_is_an_argument_of_another(path: str) -> None:
    assert_equals_uncut(PassesModule(), (torch.randn(3, 8),), split_spec={path: BEGINNING}, expect_stages=2)


class Captures(nn.Module):
    """A checkpointed closure takes nothing as argument and all from around it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.a(x)
        pipe_split()
        return checkpoint(lambda: self.b(y).masked_fill(mask, 0.0) + x, use_reentrant=False)


def test_a_checkpointed_closure_uses_tensors_from_around_it() -> None:
    args = (torch.randn(3, 8, requires_grad=True), torch.randn(3, 8) > 0)
    assert_equals_uncut(Captures(), args, expect_stages=2)


class Scaled(torch.autograd.Function):
    """Writes in place, takes None and a list, and asks which inputs need a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, factors: list[float], y: Tensor) -> Tensor:
        ctx.factors = factors
        ctx.needs = ctx.needs_input_grad
        x.mul_(factors[0])
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.factors[1], None, None, gradient * 7 if ctx.needs[3] else None


class WritesInFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        pipe_split()
        z = y * 1
        return self.b(Scaled.apply(z, None, [2.0, 3.0], y)) + z


def test_a_custom_function_writes_in_place_and_takes_lists_and_none() -> None:
    assert_equals_uncut(WritesInFunction(), (torch.randn(3, 8),), expect_stages=2)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.a(x)) * self.filter
        pipe_split()
        return self.b(torch.fft.irfft(spectrum, 8))


def test_complex_numbers_cross_a_cut() -> None:
    assert_equals_uncut(Spectrum(), (torch.randn(3, 8),), expect_stages=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_in_other_dtypes(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(dtype)
    assert_equals_uncut(model, (torch.randn(3, 8, dtype=dtype),), split_spec={"1": BEGINNING}, expect_stages=2)


def test_a_traced_graph_module_is_cut() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={"2": BEGINNING}, expect_stages=2)


class PicksRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = torch.nonzero(x[:, 0] > 0).flatten()
        x = x.index_select(0, rows).sum(0, keepdim=True)
        pipe_split()
        return self.b(x)


def test_sizes_that_depend_on_the_data_stay_inside_a_stage() -> None:
    assert_equals_uncut(PicksRows(), (torch.randn(6, 8),), expect_stages=2)
