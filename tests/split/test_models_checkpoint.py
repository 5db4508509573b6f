"""Activation checkpointing: a checkpointed part runs again in the backward of a stage, as it does uncut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pipecut import Pipe, SplitPoint, pipe_split, pipeline
from pipecut.errors import SplitError
from tests.support.equality import assert_equals_uncut, rebuild_all

BEGINNING = SplitPoint.BEGINNING
both_kinds = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Counted(nn.Module):
    """A block that notes each run of its forward."""

    runs: list[str] = []

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        Counted.runs.append(self.name)
        return self.drop(self.linear(x).tanh())


class CheckpointsItsBlocks(nn.Module):
    """checkpoint() stands in the forward that is cut."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Counted(str(index)) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.blocks[2](x)


class MarkedCheckpoints(CheckpointsItsBlocks):
    """The same with a mark between two checkpointed blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], self.stem(x), use_reentrant=self.reentrant)
        pipe_split()
        x = checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)
        return self.blocks[2](x)


class ChecksItself(nn.Module):
    """checkpoint() stands inside a block."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner, self.out = Counted("inner"), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class ChecksItselfTwice(nn.Sequential):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(8, 8), ChecksItself(reentrant), ChecksItself(reentrant))


all_places = pytest.mark.parametrize(
    ("model", "spec"),
    [
        (MarkedCheckpoints, None),
        (CheckpointsItsBlocks, {"blocks.1": BEGINNING}),
        (CheckpointsItsBlocks, {"blocks.0": SplitPoint.END}),
        (ChecksItselfTwice, {"2": BEGINNING}),
    ],
    ids=["between marks", "before a checkpointed block", "after a checkpointed block", "inside blocks"],
)


def runs_of(model: Callable[..., Tensor]) -> tuple[list[str], list[str]]:
    """The blocks that run in the forward, and those that run in the backward."""
    Counted.runs.clear()
    output = model(torch.randn(3, 8))
    forward = list(Counted.runs)
    output.sum().backward()
    return forward, Counted.runs[len(forward) :]


@both_kinds
@all_places
def test_checkpointed_models_compute_the_same(
    model: type[nn.Module], spec: dict[str, SplitPoint] | None, reentrant: bool
) -> None:
    assert_equals_uncut(model(reentrant), (torch.randn(3, 8),), split_spec=spec, expect_stages=2)


@both_kinds
@all_places
def test_checkpointed_blocks_run_again_in_backward(
    model: type[nn.Module], spec: dict[str, SplitPoint] | None, reentrant: bool
) -> None:
    uncut = model(reentrant)
    expected = runs_of(uncut)
    assert expected[1], "the uncut model has no checkpoint"
    assert runs_of(pipeline(uncut, (torch.randn(3, 8),), split_spec=spec)) == expected


class ChecksOperations(nn.Module):
    """A checkpointed function of the forward that is cut, with parameters, a mask and a keyword of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def part(self, x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        hidden = (x @ self.a.weight).sin() * scale
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0.0)
        return hidden.exp(), hidden.cos()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.a(x)
        y, z = checkpoint(self.part, x, mask, 0.5, use_reentrant=self.reentrant)
        pipe_split()
        y, w = checkpoint(self.part, self.b(y), None, 2.0, use_reentrant=self.reentrant)
        return y + w + z


@both_kinds
def test_a_checkpointed_function_of_the_cut_forward_computes_the_same(reentrant: bool) -> None:
    args = (torch.randn(3, 8, requires_grad=True), torch.randn(3, 8) > 0)
    assert_equals_uncut(ChecksOperations(reentrant), args, expect_stages=2)


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """How much memory autograd keeps for the backward, outside of checkpoints."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(kept.values())


@both_kinds
@pytest.mark.parametrize("rebuild", [False, True], ids=["kept modules", "rebuilt modules"])
def test_checkpointed_operations_of_the_cut_forward_keep_no_activations(reentrant: bool, rebuild: bool) -> None:
    uncut = ChecksOperations(reentrant)
    args = (torch.randn(64, 8), torch.randn(64, 8) > 0)
    pipe: Pipe = rebuild_all(uncut, (args, {}), None) if rebuild else pipeline(uncut, args)
    assert saved_bytes(partial(pipe, *args)) <= saved_bytes(partial(uncut, *args))


def test_checkpoint_sequential_computes_the_same() -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint_sequential(self.layers, 2, x, use_reentrant=False))

    args = (torch.randn(3, 8, requires_grad=True),)
    assert_equals_uncut(Segments(), args, split_spec={"head": BEGINNING}, expect_stages=2)


@both_kinds
def test_a_cut_inside_a_checkpointed_part_is_refused(reentrant: bool) -> None:
    with pytest.raises(SplitError, match="'blocks.1.drop' is inside a part under torch.utils.checkpoint"):
        pipeline(CheckpointsItsBlocks(reentrant), (torch.randn(3, 8),), split_spec={"blocks.1.drop": BEGINNING})


class CheckpointsItsCall(nn.Module):
    """The class wraps its own calls, as the layers of some libraries do."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = Counted("wrapped")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=self.reentrant)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(x) * scale


@both_kinds
def test_a_class_that_checkpoints_its_own_calls_runs_again_in_backward(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(CheckpointsItsCall(reentrant) for _ in range(2)))
    assert_equals_uncut(model, (torch.randn(3, 8),), split_spec={"2": BEGINNING}, expect_stages=2)
    expected = runs_of(model)
    assert expected[1] == ["wrapped", "wrapped"]
    assert runs_of(pipeline(model, (torch.randn(3, 8),), split_spec={"2": BEGINNING})) == expected
