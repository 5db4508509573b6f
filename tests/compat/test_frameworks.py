"""Habits of frameworks that were written for upstream: stages without memory, and attributes that they set."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeError
from pipecut.compat import PipelineStage, schedules
from pipecut.compat.microbatch import TensorChunkSpec
from tests.support.ranks import Ranks

LOSS = nn.functional.mse_loss


class Block(nn.Module):
    """A layer with a buffer, whose sum can be taken along with another tensor."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, *, added: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.layer(x)) * self.scale
        return y if added is None else y + added.transpose(0, 1)


class Wrapper(nn.Module):
    """Wrapper that a framework puts around a module after the stage is made."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def meta_blocks(count: int) -> list[nn.Module]:
    with torch.device("meta"):
        return [Block() for _ in range(count)]


def fill(module: nn.Module, seed: int) -> None:
    """Give a module memory and values, as a framework does once everything is wrapped."""
    module.to_empty(device="cpu")
    torch.manual_seed(seed)
    for tensor in [*module.parameters(), *module.buffers()]:
        nn.init.normal_(tensor)


def assert_as_uncut(modules: Iterable[nn.Module], x: Tensor, y: Tensor) -> None:
    uncut = nn.Sequential(*copy.deepcopy(list(modules)))
    uncut.zero_grad()
    LOSS(uncut(x), y).backward()
    for wanted, module in zip(uncut, modules, strict=True):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, dict(wanted.named_parameters())[name].grad, msg=name)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_stages_get_their_memory_after_the_schedule_is_made(name: str) -> None:
    """torchtitan wraps the modules of its stages, makes the schedule, and then calls to_empty() and initialises."""
    stages = [PipelineStage(block, index, 2, "cpu") for index, block in enumerate(meta_blocks(2))]
    for stage in stages:
        stage.submod = Wrapper(stage.submod)
    ranks = {} if name == "1F1B" else {"ranks": 1}
    schedule = schedules.get_schedule_class(name)(stages, 4, LOSS, **ranks)  # type: ignore[arg-type]
    for index, stage in enumerate(stages):
        fill(stage.submod, index)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(x, target=y)
        assert_as_uncut([stage.submod for stage in stages], x, y)


def test_a_step_without_memory_says_what_to_do() -> None:
    stage = PipelineStage(meta_blocks(1)[0], 0, 1, "cpu")
    schedule = schedules.Schedule1F1B(stage, 2, LOSS)
    x = torch.randn(4, 4)
    told = r"stage 0 has no values, only shapes .*: layer.weight, layer.bias, scale.*module.to_empty\(device=device\)"
    with pytest.raises(PipeError, match=told):
        schedule.step(x, target=x)
    fill(stage.submod, 0)
    schedule.step(x, target=x)
    assert_as_uncut([stage.submod], x, x)


def in_two_ranks(rank: int) -> None:
    """Stages that get their memory late, then a step with another number of tokens, as a framework does it."""
    stage = PipelineStage(meta_blocks(2)[rank], rank, 2, "cpu")
    schedule = schedules.Schedule1F1B(stage, 2, LOSS)
    fill(stage.submod, rank)
    uncut = [Block(), Block()]
    for index, block in enumerate(uncut):
        fill(block, index)
    for tokens in (3, 5):
        stage.args_recv_info, stage.grad_recv_info, stage.grad_send_info = {}, {}, None  # type: ignore[attr-defined]
        torch.manual_seed(tokens)
        x, y = torch.randn(4, tokens, 4), torch.randn(4, tokens, 4)
        stage.submod.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), target=y if rank else None)
        whole = nn.Sequential(*copy.deepcopy(uncut))
        LOSS(whole(x), y).backward()
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, dict(whole[rank].named_parameters())[name].grad, msg=name)


@pytest.mark.distributed
def test_memory_and_other_sizes_come_late_on_ranks(two_ranks: Ranks) -> None:
    two_ranks.run(in_two_ranks)


def test_a_spec_that_is_set_cuts_the_next_steps() -> None:
    """Automodel sets the spec of keywords around every step, for models whose samples are not in the first dim."""
    block = Block()
    schedule = schedules.Schedule1F1B(PipelineStage(block, 0, 1, "cpu"), 2, LOSS)
    x, added = torch.randn(4, 4), torch.randn(4, 4)
    wanted = block(x, added=added).detach()
    before = schedule._kwargs_chunk_spec
    schedule._kwargs_chunk_spec = {"added": TensorChunkSpec(1)}
    torch.testing.assert_close(schedule.step(x, target=x, added=added), wanted)
    schedule._kwargs_chunk_spec = before
    assert schedule._kwargs_chunk_spec is before
    with pytest.raises(PipeError):
        schedule.step(x, target=x, added=added)  # [2, 4] + [4, 2]: cut by rows again


def noted(*args: Any) -> None:
    """A method that a framework puts in the place of one of upstream's."""


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("backward_maybe_with_nosync", noted, "gradients are reduced once a step by the executor"),
        ("_post_metadata_inference_cleanup", noted, "shapes follow from the sizes of each step"),
        ("args_recv_info", {0: ()}, "what is sent and received is the work of the schedule's executor"),
    ],
)
def test_what_is_set_on_a_stage_for_nothing_is_an_error(name: str, value: Any, told: str) -> None:
    stage = PipelineStage(Block(), 0, 1, "cpu")
    schedules.Schedule1F1B(stage, 2, LOSS)
    told = f"PipelineStage.{name} is set to .*, and nothing here would use it: {told}"
    with pytest.raises(AttributeError, match=told) as caught:
        setattr(stage, name, value)
    assert isinstance(caught.value, PipeError)
    assert not hasattr(stage, "args_recv_info")


def test_what_is_set_on_a_schedule_for_nothing_is_an_error() -> None:
    schedule = schedules.Schedule1F1B(PipelineStage(Block(), 0, 1, "cpu"), 2, LOSS)
    with pytest.raises(AttributeError, match="Schedule1F1B._warmup_p2p is set to .*: connections are made by the"):
        schedule._warmup_p2p = noted
    schedule._stage_forward_initialized = False  # which asks to prepare again what is never prepared here
