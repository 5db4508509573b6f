"""Buffers: batch norm statistics, counters, constants, and what a stage saves of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split, pipeline
from pipecut.errors import SplitError
from tests.support.equality import assert_equals_uncut

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Residual(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm(self.conv(x))).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("path", ["blocks.1", "blocks.1.norm"])
def test_batch_norm_keeps_its_statistics(training: bool, path: str) -> None:
    others = [((torch.randn(5, 2, 6, 6),), {})]
    model = ResNet().train(training)
    assert_equals_uncut(
        model, (torch.randn(3, 2, 6, 6),), split_spec={path: BEGINNING}, expect_stages=2, other_calls=others
    )


class InPlaceCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class AssignedCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(x) * self.count


@pytest.mark.parametrize("counter", [InPlaceCounter, AssignedCounter])
def test_a_block_counts_its_calls_in_a_buffer(counter: type[nn.Module]) -> None:
    model = nn.Sequential(counter(), counter())
    assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={"1": BEGINNING}, expect_stages=2)


@pytest.mark.parametrize("point", [BEGINNING, END])
def test_a_block_that_assigns_a_buffer_is_cut_between_the_assignment_and_its_use(point: SplitPoint) -> None:
    model = nn.Sequential(nn.Linear(8, 8), AssignedCounter())
    assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={"1.linear": point}, expect_stages=2)


def test_a_buffer_written_in_one_stage_and_read_in_the_next_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), InPlaceCounter())
    with pytest.raises(SplitError, match=r"buffer 1\.count is updated in forward and used by stages \[0, 1\]"):
        pipeline(model, (torch.randn(3, 8),), split_spec={"1.linear": BEGINNING})


class CounterInTheCutForward(nn.Module):
    def __init__(self, *, assign: bool) -> None:
        super().__init__()
        self.assign = assign
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        if self.assign:
            self.count = self.count + 1
        else:
            self.count += 1
        return self.b(x) * self.count


@pytest.mark.parametrize("assign", [True, False])
def test_the_cut_forward_itself_counts_in_a_buffer(assign: bool) -> None:
    model = CounterInTheCutForward(assign=assign)
    pipe = assert_equals_uncut(model, (torch.randn(3, 8),), expect_stages=2, trace_twice=True)
    assert "count" not in pipe.stages[0].state_dict()


class RunningMean(nn.Module):
    """A buffer written under no_grad, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.linear(x - self.mean) + self.table


def test_a_buffer_is_written_without_gradient_and_another_is_not_saved() -> None:
    model = nn.Sequential(RunningMean(), RunningMean())
    pipe = assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={"1": BEGINNING}, expect_stages=2)
    assert set(pipe.stages[1].state_dict()) == {"1.mean", "1.linear.weight", "1.linear.bias"}
    assert "1.table" in dict(pipe.stages[1].named_buffers())


class NotSavedInTheCutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.table
        pipe_split()
        return self.b(x) * self.table


def test_a_buffer_that_is_not_saved_is_used_on_both_sides_of_a_cut() -> None:
    pipe = assert_equals_uncut(NotSavedInTheCutForward(), (torch.randn(3, 8),), expect_stages=2)
    for stage in pipe.stages:
        assert "table" in stage._non_persistent_buffers_set


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.plain = torch.tensor([0.5, 1.0, 2.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * torch.tensor([1.0, -1.0, 1.0, -1.0])
        pipe_split()
        return self.b(x * self.plain) + torch.tensor(3)


def test_constants_of_the_forward_go_with_their_stage() -> None:
    pipe = assert_equals_uncut(Constants(), (torch.randn(3, 4),), expect_stages=2)
    assert set(pipe.stages[0].state_dict()) == {"a.weight", "a.bias"}


def test_constants_of_a_block_go_with_their_stage() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.plain = torch.tensor([0.5, 1.0, 2.0, 4.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])

    assert_equals_uncut(nn.Sequential(Scaled(), Scaled()), (torch.randn(3, 4),), split_spec={"1": BEGINNING})


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.spare = nn.Parameter(torch.ones(3))
        self.never_called = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_unused_parameters_and_uncalled_modules_are_kept_and_listed() -> None:
    pipe = assert_equals_uncut(Unused(), (torch.randn(3, 8),), split_spec={"b": BEGINNING}, expect_stages=2)
    assert set(pipe.unused_parameters) == {
        "spare", "never_called.0.weight", "never_called.0.bias", "never_called.1.weight", "never_called.1.bias",
    }  # fmt: skip
    assert not pipe.tied_parameters


class NormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(self.norm(x)))


def test_a_batch_norm_that_two_stages_update_is_refused() -> None:
    with pytest.raises(SplitError, match=r"buffer norm\.\w+ is updated in forward and used by stages \[0, 1\]"):
        pipeline(NormTwice(), (torch.randn(3, 8),), split_spec={"a": BEGINNING})


def test_a_batch_norm_in_two_stages_is_refused_in_eval_mode_too_because_train_may_follow() -> None:
    with pytest.raises(SplitError, match=r"each stage would keep a copy of its own \(after train\(\), if not now\)"):
        pipeline(NormTwice().eval(), (torch.randn(3, 8),), split_spec={"a": BEGINNING})


def test_a_parameter_is_called_a_parameter() -> None:
    """One that the forward writes to was called a buffer."""

    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.a.weight.clamp_(-0.1, 0.1)
            return self.b(self.a(x)) @ self.a.weight  # type: ignore[no-any-return]

    with pytest.raises(SplitError, match=r"parameter a\.weight is updated in forward and used by stages \[0, 1\]"):
        pipeline(Clamps(), (torch.ones(2, 4),), split_spec={"b": SplitPoint.BEGINNING})
