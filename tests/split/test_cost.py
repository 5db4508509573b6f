"""FLOPs of a traced model beside torch's own counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipecut import pipeline
from tests.support.sampling import sampled


class Attention(nn.Module):
    """Scaled dot-product attention of an input with itself, two heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


class Products(nn.Module):
    """The matrix products by their own names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = torch.bmm(x, x.transpose(1, 2))
        row = torch.addmm(torch.zeros(8), x[0], torch.ones(8, 8))
        return square @ x + torch.baddbmm(x, square, x) + torch.mm(x[0], torch.ones(8, 8)) + row


def flops_at(flops: sympy.Expr, batch: int) -> int:
    return int(flops.subs(dict.fromkeys(flops.free_symbols, batch)))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(8, 16), (3, 5, 8)),
        (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (3, 4, 9, 9)),
        (lambda: nn.Conv1d(4, 6, 3, padding=1), (3, 4, 9)),
        (lambda: nn.ConvTranspose2d(4, 6, 3), (3, 4, 5, 5)),
        (Attention, (3, 5, 8)),
        (Products, (3, 5, 8)),
    ],
)
def test_flops_are_those_that_torch_counts(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(make())
    x = torch.ones(shape)
    (info,) = pipeline(model, (x,)).stage_infos
    counter = FlopCounterMode(display=False)
    # Of attention, torch counts only the parts that it is made of in the plain implementation.
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(x)
    assert flops_at(info.flops, shape[0]) == counter.get_total_flops()


class Applied(nn.Module):
    """A function of the input and some parameters."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


class FirstResult(nn.Module):
    """A recurrent layer or cell whose states nobody uses."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        return result[0] if isinstance(result, tuple) else result


MADE_OF_PRODUCTS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "einsum": (Applied(lambda x, a: torch.einsum("bti,ij->btj", x, a), (8, 6)), (4, 6, 8)),
    "einsum heads": (Applied(lambda x, a: torch.einsum("bti,hij->bhtj", x, a), (3, 8, 6)), (4, 6, 8)),
    "einsum ellipsis": (Applied(lambda x, a: torch.einsum("...i,ij->...j", x, a), (8, 6)), (4, 6, 8)),
    "einsum of three": (Applied(lambda x, a, b: torch.einsum("bti,ij,jk->btk", x, a, b), (8, 6), (6, 5)), (4, 6, 8)),
    "einsum with itself": (Applied(lambda x: torch.einsum("bti,bsi->bts", x, x)), (4, 6, 8)),
    "einsum that only sums": (Applied(lambda x: torch.einsum("bti->bt", x)), (4, 6, 8)),
    "tensordot": (Applied(lambda x, a: torch.tensordot(x, a, dims=1), (8, 6)), (4, 6, 8)),
    "inner": (Applied(torch.inner, (6, 8)), (4, 6, 8)),
    "outer": (Applied(lambda x, a: torch.outer(x[0, 0], a), (8,)), (4, 6, 8)),
    "multi_dot": (Applied(lambda x, a, b: torch.linalg.multi_dot([x[0], a, b]), (8, 5), (5, 3)), (4, 6, 8)),
    "matrix_power": (Applied(lambda x: torch.matrix_power(x @ x.mT, 3)), (4, 6, 8)),
    "gru": (FirstResult(nn.GRU(8, 5, batch_first=True, bidirectional=True)), (4, 2, 8)),
    "rnn": (FirstResult(nn.RNN(8, 5, batch_first=True)), (4, 2, 8)),
    "lstm cell": (FirstResult(nn.LSTMCell(8, 5)), (4, 8)),
    "gru cell": (FirstResult(nn.GRUCell(8, 5)), (4, 8)),
}


@pytest.mark.parametrize(
    "name",
    sampled(MADE_OF_PRODUCTS, lambda name: name not in ("gru", "rnn", "einsum heads", "einsum ellipsis", "outer")),
)
def test_operators_that_are_made_of_products_count_as_these(name: str) -> None:
    """einsum, tensordot and inner stay in a trace as they are, and counted as nothing: the cut took them for free."""
    model, shape = MADE_OF_PRODUCTS[name]
    (info,) = pipeline(model, (torch.ones(shape),)).stage_infos
    for batch in (4, 7):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(torch.ones(batch, *shape[1:]))
        assert flops_at(info.flops, batch) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("model", "flops"),
    [
        (Applied(lambda x, a: torch.nn.functional.bilinear(x, x, a), (5, 8, 8)), 4 * 6 * 5 * 2 * 8 * 8),
        (Applied(lambda x, a: torch.addbmm(a, x, x.mT), (6, 6)), 4 * 2 * 6 * 6 * 8),
        (Applied(lambda x, a: torch.addmv(x[:, 0, 0], x[:, 0], a), (8,)), 4 * 2 * 8),
        (Applied(lambda x, a: torch.mv(x[:, 0], a), (8,)), 4 * 2 * 8),
        (Applied(lambda x, a: x + torch.dot(x[0, 0], a) + torch.vdot(a, a), (8,)), 2 * 2 * 8),
        (Applied(lambda x, a: torch.cdist(x, a.expand(x.shape[0], -1, -1)), (40, 8)), 4 * 6 * 40 * 2 * 8),
    ],
)
def test_products_that_torch_does_not_count_have_formulas(model: nn.Module, flops: int) -> None:
    (info,) = pipeline(model, (torch.ones(4, 6, 8),)).stage_infos
    assert flops_at(info.flops, 4) == flops


def test_flops_of_one_trace_hold_for_any_batch() -> None:
    (info,) = pipeline(nn.Sequential(nn.Linear(8, 16)), (torch.ones(3, 8),)).stage_infos
    (batch,) = info.flops.free_symbols
    assert info.flops == 2 * batch * 8 * 16


def test_recurrent_layers_count_every_matrix_at_every_position() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]  # type: ignore[no-any-return]

    (info,) = pipeline(Recurrent(), (torch.ones(3, 5, 8),)).stage_infos
    (batch,) = info.flops.free_symbols
    assert info.flops == 2 * batch * 5 * (16 * 8 + 16 * 4)
