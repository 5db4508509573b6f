"""Activation checkpointing of blocks, under every schedule: they run again in the backward; gradients stay exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from pipecut import Pipe, PipelineStage, PlannedSchedule, SplitPoint, pipeline
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.run.random_models import by_microbatches, noisy_loss
from tests.stage.backward.runs import choose_way
from tests.support.models import traced_stages
from tests.support.sampling import sampled
from tests.support.training import TIGHT, Problem, Result, assert_same_gradients, cut_step

STAGES, BLOCKS, WIDTH, SIZES = 4, 8, 6, (2, 2, 1, 1)
SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]


class Block(nn.Module):
    """Counts its runs, and draws random numbers."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        Block.runs += 1
        return x + self.drop(torch.tanh(self.layer(x)))


class Tower(nn.Module):
    """Blocks that the forward goes through one by one, and tied ends."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def cut_tower() -> Pipe:
    """Two blocks per stage."""
    torch.manual_seed(0)
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(2, BLOCKS, 2)}
    return pipeline(Tower().double(), (torch.randn(3, WIDTH, dtype=torch.float64),), split_spec=spec)


class Wrapped(nn.Module):
    """A user's own wrapper."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return result


def own_wrapper(layers: nn.ModuleList, index: int, reentrant: bool) -> None:
    layers[index] = Wrapped(layers[index], reentrant)


def wrapper_of_torch(layers: nn.ModuleList, index: int, reentrant: bool) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    layers[index] = checkpoint_wrapper(layers[index], checkpoint_impl=kind)


def patched_forward(layers: nn.ModuleList, index: int, reentrant: bool) -> None:
    block = layers[index]
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)  # type: ignore[method-assign]


WRAPPERS = [own_wrapper, wrapper_of_torch, patched_forward]


def schedule_of(name: str, stages: list[PipelineStage], loss_fn: Any) -> PlannedSchedule:
    chunks = FAMILIES[name].chunks
    plan = plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=len(SIZES))
    return PlannedSchedule(stages, plan, loss_fn, random_numbers="as_uncut")


def problem_of(model: nn.Module) -> Problem:
    numbers = torch.Generator().manual_seed(0)
    x, y = (torch.randn(sum(SIZES), WIDTH, dtype=torch.float64, generator=numbers) for _ in range(2))
    return Problem(model, (x,), y, noisy_loss)


def trained(schedule: PlannedSchedule, problem: Problem) -> tuple[Result, int]:
    """A step, and how often blocks ran in it."""
    Block.runs = 0
    torch.manual_seed(5)
    return cut_step(schedule, problem), Block.runs


def expected_of(problem: Problem) -> Result:
    torch.manual_seed(5)
    return by_microbatches(problem, SIZES)


@pytest.fixture(scope="module")
def half_checkpointed() -> tuple[Pipe, list[PipelineStage], Result]:
    """The second block of each stage is checkpointed; and what the model gives that has no checkpoints."""
    pipe = cut_tower()
    expected = expected_of(problem_of(pipe.traced.model))
    stages = traced_stages(pipe)
    for stage in stages:
        layers: Any = stage.submod.layers
        wrapper_of_torch(layers, 2 * stage.stage_index + 1, reentrant=False)
    return pipe, stages, expected


@pytest.mark.parametrize("way", ["at once", "deferred"])
@pytest.mark.parametrize("name", sampled(SCHEDULES, lambda name: name in ("GPipe", "1F1B", "ZB-H1", "ZBVZeroBubble")))
def test_every_schedule(
    name: str,
    way: str,
    half_checkpointed: tuple[Pipe, list[PipelineStage], Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weight gradients that are put off, one way or the other, need nothing to be computed a third time."""
    choose_way(way, monkeypatch)
    pipe, stages, expected = half_checkpointed
    problem = problem_of(pipe.traced.model)
    found, runs = trained(schedule_of(name, stages, problem.loss_fn), problem)
    assert_same_gradients(found.gradients, expected.gradients, TIGHT)
    assert torch.equal(found.output, expected.output)
    assert runs == len(SIZES) * (BLOCKS + BLOCKS // 2)


@pytest.mark.parametrize(
    "reentrant", sampled([False, True], lambda reentrant: not reentrant), ids=["not reentrant", "reentrant"]
)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_every_wrapper(wrap: Callable[..., None], reentrant: bool) -> None:
    """Under full backwards, and under those that put weight gradients off."""
    pipe = cut_tower()
    problem = problem_of(pipe.traced.model)
    expected = expected_of(problem)
    stages = traced_stages(pipe)
    for stage in stages:
        layers: Any = stage.submod.layers
        for index in (2 * stage.stage_index, 2 * stage.stage_index + 1):
            wrap(layers, index, reentrant)
    for name in ("Interleaved1F1B", "ZBVZeroBubble"):
        found, runs = trained(schedule_of(name, stages, problem.loss_fn), problem)
        assert_same_gradients(found.gradients, expected.gradients, TIGHT)
        assert runs == 2 * len(SIZES) * BLOCKS


def test_all_blocks_of_a_class_at_once_and_names_stay() -> None:
    pipe = cut_tower()
    problem = problem_of(pipe.traced.model)
    names, expected = set(pipe.traced.model.state_dict()), expected_of(problem)
    stages = traced_stages(pipe)
    for stage in stages:
        apply_activation_checkpointing(stage.submod, check_fn=lambda module: isinstance(module, Block))
    assert {name for stage in stages for name in stage.submod.state_dict()} == names
    found, runs = trained(schedule_of("ZB-H1", stages, problem.loss_fn), problem)
    assert_same_gradients(found.gradients, expected.gradients, TIGHT)
    assert runs == 2 * len(SIZES) * BLOCKS


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """The sizes of the tensors that autograd keeps, parameters aside; a checkpoint keeps its own to itself."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def test_checkpointed_blocks_keep_less(half_checkpointed: tuple[Pipe, list[PipelineStage], Result]) -> None:
    kept = []
    for stages in (traced_stages(cut_tower()), half_checkpointed[1]):
        schedule = schedule_of("GPipe", stages, noisy_loss)
        problem = problem_of(nn.Identity())
        with saved_bytes() as sizes:
            schedule.step(*problem.args, target=problem.target)
        kept.append(sum(sizes))
    assert kept[1] < 0.7 * kept[0]


def test_members_may_be_replaced_where_a_stage_holds_some_of_them() -> None:
    """Under the index in the model; the length of what is here was taken for the end of the list."""
    stage = traced_stages(cut_tower())[3]
    layers: Any = stage.submod.layers
    before = layers[7]
    own_wrapper(layers, -1, reentrant=False)
    assert layers[7].block is before
    assert list(layers._modules) == ["6", "7"]
    with pytest.raises(IndexError, match="member 0 is not in this stage; those here: 6, 7"):
        layers[0] = before
