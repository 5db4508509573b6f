"""Modules and parameters that a model uses twice keep their one name, and their gradients are summed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split
from tests.support.equality import assert_equals_uncut

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class CalledThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blk, self.head = Block(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blk(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("spec", "tied"),
    [
        ({"blk#1": BEGINNING}, True),
        ({"blk": END}, True),
        ({"blk#1": BEGINNING, "blk#2": BEGINNING, "head": BEGINNING}, True),
        ({"blk.down#1": BEGINNING}, True),
        ({"blk#2": END}, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_block_called_three_times_is_cut_between_and_inside_its_calls(
    spec: dict[str, SplitPoint], tied: bool
) -> None:
    pipe = assert_equals_uncut(CalledThrice(), (torch.randn(3, 8),), split_spec=spec, expect_stages=len(spec) + 1)
    assert bool(pipe.tied_parameters) == tied


class MarkInsideReusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        pipe_split()
        return x + self.down(hidden)


class ReusedAndCutInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blk = MarkInsideReusedBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.blk(self.blk(x).tanh())


def test_a_block_with_a_mark_inside_is_called_twice() -> None:
    # The middle stage runs the second half of the first call and the first half of the second.
    pipe = assert_equals_uncut(ReusedAndCutInside(), (torch.randn(3, 8),), expect_stages=3)
    assert {name for tie in pipe.tied_parameters for name in tie.names} == {
        "blk.up.weight", "blk.up.bias", "blk.down.weight", "blk.down.bias",
    }  # fmt: skip


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.between = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


@pytest.mark.parametrize("path", ["between", "first#1", "between.", "second.up#1"])
def test_a_module_is_registered_under_two_names(path: str) -> None:
    spec = {"between": END} if path == "between." else {path: BEGINNING}
    pipe = assert_equals_uncut(TwoNames(), (torch.randn(3, 8),), split_spec=spec, expect_stages=2)
    names = {name for tie in pipe.tied_parameters for name in tie.names}
    assert {"first.up.weight", "second.up.weight"} <= names


class TiedWeights(nn.Module):
    """One parameter under three names, in modules of different classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.a.weight = self.b.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(self.a(self.table(ids)).relu())


def test_a_parameter_of_three_modules_is_one_parameter() -> None:
    spec = {"a": BEGINNING, "b": BEGINNING}
    pipe = assert_equals_uncut(TiedWeights(), (torch.randint(0, 8, (4, 3)),), split_spec=spec, expect_stages=3)
    (tie,) = pipe.tied_parameters
    assert set(tie.names) == {"table.weight", "a.weight", "b.weight"}
    assert tie.stages == (0, 1, 2)


class DirectParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(8))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(3))
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(8))})
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.pos) * self.scales[0]
        pipe_split()
        x = self.body(x) * self.scales[1] + self.named["bias"]
        pipe_split()
        return x * self.scales[2] - self.pos


def test_parameters_are_used_directly_in_the_forward_that_is_cut() -> None:
    pipe = assert_equals_uncut(DirectParameter(), (torch.randn(3, 8),), expect_stages=3)
    (tie,) = pipe.tied_parameters
    assert (tie.names, tie.stages) == (("pos",), (0, 2))
    assert set(pipe.stages[0].state_dict()) == {"pos", "scales.0"}
