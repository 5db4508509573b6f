"""In-place writes and views around a cut, and tensors whose memory is not in the order of their dims."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split, pipeline
from pipecut.errors import SplitError
from tests.support.equality import assert_equals_uncut

Half = Callable[..., "Tensor | tuple[Tensor, ...]"]


class Halves(nn.Module):
    """Two linear layers with a given function after the first one and another before the second, and a mark between."""

    def __init__(self, before: Half, after: Half) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        made = self.before(self.a(x))
        pipe_split()
        return self.b(self.after(*made) if isinstance(made, tuple) else self.after(made))


def same(x: Tensor) -> Tensor:
    return x


def add_in_place(x: Tensor) -> Tensor:
    x += 1
    return x.sin()


def relu_in_place(x: Tensor) -> Tensor:
    return F.relu(x * 1, inplace=True) if x.is_leaf else torch.relu_(x)


def write_rows(x: Tensor) -> Tensor:
    x = x * 2
    x[0] = 0.5
    x[:, 1:3].mul_(3)
    return x


def write_to_view(x: Tensor) -> Tensor:
    x.view(-1, 2, 4)[:, 0].zero_()
    return x


def write_then_use_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    y.add_(x)
    return y, y * 2


def masked_fill_in_place(x: Tensor) -> Tensor:
    x.masked_fill_(x > 0.2, 0.0)
    x[x < -0.5] = -0.5
    return x


WRITES: list[tuple[Half, Half]] = [
    (torch.sin, add_in_place),
    (torch.sin, relu_in_place),
    (torch.sin, write_rows),
    (torch.sin, write_to_view),
    (torch.sin, masked_fill_in_place),
    (add_in_place, same),
    (write_rows, add_in_place),
    (write_to_view, same),
    (write_then_use_twice, lambda y, z: y.mul_(2) + z),
    (lambda x: (x.sin(), x), lambda y, x: y + x.cos()),
    (lambda x: (x * 1).t(), lambda x: x.add_(1).t().contiguous()),
]
LAYOUTS = [
    pytest.param(lambda x: x.t(), lambda x: x.t().contiguous(), id="transposed"),
    pytest.param(lambda x: x.t(), lambda x: x.t().view(2, 16)[:, :8], id="viewed"),
    pytest.param(lambda x: x.mean(0).expand(6, 8), same, id="expanded"),
    pytest.param(lambda x: x[::2, 1:5], lambda x: torch.cat([x, x], 1), id="sliced"),
    pytest.param(lambda x: x.view(4, 2, 4).permute(2, 0, 1), lambda x: x.permute(1, 2, 0).reshape(4, 8), id="permuted"),
    pytest.param(lambda x: x.t(), lambda x: x.stride(0) * x.t().contiguous(), id="stride"),
    pytest.param(lambda x: x.unfold(1, 4, 2)[..., 0], lambda x: x.repeat(1, 3)[:, :8], id="unfolded"),
    pytest.param(lambda x: x.chunk(2, 1), lambda left, right: torch.cat([right, left], 1), id="chunks"),
    pytest.param(lambda x: x.diagonal().contiguous(), lambda x: x.repeat(2).view(1, 8), id="diagonal"),
    pytest.param(lambda x: x[:0], same, id="empty"),
    pytest.param(lambda x: x.sum(), lambda x: x.expand(1, 8), id="scalar"),
]


@pytest.mark.filterwarnings("ignore:the trace of Halves holds for some sizes only")
@pytest.mark.parametrize(
    ("before", "after"),
    [*WRITES, *LAYOUTS],
    ids=lambda half: "lambda" if half.__name__ == "<lambda>" else half.__name__,
)
def test_in_place_writes_and_any_layout_beside_a_cut(before: Half, after: Half) -> None:
    assert_equals_uncut(Halves(before, after), (torch.randn(4, 8, requires_grad=True),), expect_stages=2)


def test_a_received_tensor_is_written_to_and_another_stage_sees_the_old_one() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            old = x.clone()
            pipe_split()
            x.mul_(2)
            y = self.b(x)
            pipe_split()
            return self.c(y) + old + x

    assert_equals_uncut(Fork(), (torch.randn(4, 8),), expect_stages=3)


def test_a_tensor_is_written_to_in_three_stages() -> None:
    class Accumulator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros_like(x)
            for layer in self.layers:
                x = layer(x)
                total += x
            return total

    spec = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.BEGINNING}
    assert_equals_uncut(Accumulator(), (torch.randn(4, 8),), split_spec=spec, expect_stages=3)


def test_the_model_writes_to_its_own_input() -> None:
    class WritesInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x.mul_(2)
            y = self.a(x)
            pipe_split()
            mask.logical_not_()
            return self.b(y).masked_fill(mask, 0.0) + x

    assert_equals_uncut(WritesInput(), (torch.randn(4, 8), torch.randn(4, 8) > 0), expect_stages=2)


def test_two_views_of_one_tensor_come_in_and_one_is_written() -> None:
    halves = Halves(lambda x: (x[:, :4], x), lambda left, x: (left.mul_(2), x.sin())[1])
    with pytest.raises(SplitError, match="views of one tensor, both come into stage 1, and stage 1 writes"):
        pipeline(halves, (torch.randn(4, 8),))


def test_a_view_is_used_after_a_later_stage_wrote_to_its_base() -> None:
    class WritesBase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).sin()
            left = x[:, :4]
            pipe_split()
            x.mul_(2)
            y = self.b(x)
            pipe_split()
            return y + left.sum()

    with pytest.raises(SplitError, match="used in stage 2 after stage 1 wrote to another view of it in place"):
        pipeline(WritesBase(), (torch.randn(4, 8),))


def test_a_block_writes_to_what_it_receives() -> None:
    class WritesArgument(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.linear(x)

    model = nn.Sequential(nn.Linear(8, 8), WritesArgument(), nn.ReLU(inplace=True))
    spec = {"1": SplitPoint.BEGINNING, "2": SplitPoint.BEGINNING}
    assert_equals_uncut(model, (torch.randn(4, 8),), split_spec=spec, expect_stages=3)


def test_an_image_in_channels_last_crosses_a_cut() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    image = torch.randn(2, 2, 6, 6).to(memory_format=torch.channels_last)
    assert_equals_uncut(model, (image,), split_spec={"1": SplitPoint.BEGINNING}, expect_stages=2)
