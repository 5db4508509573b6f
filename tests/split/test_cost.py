"""FLOPs of a traced model beside torch's own counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipecut import pipeline


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
    assert int(info.flops.subs(dict.fromkeys(info.flops.free_symbols, shape[0]))) == counter.get_total_flops()


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
