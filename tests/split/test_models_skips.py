"""Values that skip stages: U-Nets, values with several users, inputs of later stages, outputs of early ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipecut import Pipe, SplitPoint, pipe_split
from tests.support.equality import assert_equals_uncut

BEGINNING = SplitPoint.BEGINNING


def routes(pipe: Pipe) -> set[tuple[str, int, int]]:
    """Kind, source and target of every edge."""
    return {(edge.kind, edge.source, edge.target) for edge in pipe.edges}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 4, 2, stride=2), nn.Conv2d(8, 2, 1)])

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down[0](image).relu()
        pipe_split()
        coarse = self.down[1](fine).relu()
        pipe_split()
        deep = self.middle(coarse).relu()
        pipe_split()
        deep = self.up[0](torch.cat([deep, coarse], 1)).relu()
        pipe_split()
        return self.up[1](torch.cat([deep, fine], 1)) + image


def test_a_unet_has_skips_over_two_and_four_stages() -> None:
    image = torch.randn(2, 2, 4, 4, requires_grad=True)
    pipe = assert_equals_uncut(UNet(), (image,), expect_stages=5, other_calls=[((torch.randn(5, 2, 4, 4),), {})])
    assert {("activation", 1, 3), ("activation", 0, 4), ("root input", 0, 4)} < routes(pipe)


class LongSkips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.layers:
            x = layer(x).tanh()
            made.append(x)
        return x * made[1] + made[2]


def test_values_skip_three_and_four_stages() -> None:
    spec = {f"layers.{index}": BEGINNING for index in range(1, 6)}
    pipe = assert_equals_uncut(LongSkips(), (torch.randn(3, 8),), split_spec=spec, expect_stages=6)
    assert {("activation", 1, 5), ("activation", 2, 5)} < routes(pipe)


class ThreeUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.stem(x).sigmoid()
        y = shared.exp()
        pipe_split()
        y = self.a(y) * shared
        pipe_split()
        y = self.b(y) + shared
        pipe_split()
        return self.c(y) - shared


def test_a_value_is_used_by_three_later_stages() -> None:
    pipe = assert_equals_uncut(ThreeUsers(), (torch.randn(3, 8, requires_grad=True),), expect_stages=4)
    shared = [edge.value for edge in pipe.edges if edge.source == 0 and edge.target == 3]
    assert len(shared) == 1
    assert [edge.target for edge in pipe.edges if edge.value == shared[0]] == [1, 2, 3]


class EarlyOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = self.stem(x)
        pipe_split()
        y = self.body(early).relu()
        pipe_split()
        return early, self.head(y), x


def test_an_output_is_made_in_the_first_stage() -> None:
    pipe = assert_equals_uncut(EarlyOutput(), (torch.randn(3, 8, requires_grad=True),), expect_stages=3)
    assert {("activation", 0, 2), ("root input", 0, 2)} < routes(pipe)


class LateInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, shift: Tensor, weights: Tensor) -> Tensor:
        x = self.layers[0](x)
        pipe_split()
        x = self.layers[1](x + shift)
        pipe_split()
        return (self.layers[2](x) + shift) * weights


def test_inputs_of_later_stages_get_their_gradients() -> None:
    args = tuple(torch.randn(3, 8, requires_grad=grad) for grad in (False, True, True))
    pipe = assert_equals_uncut(LateInputs(), args, expect_stages=3)
    assert {("root input", 0, 1), ("root input", 0, 2)} < routes(pipe)
