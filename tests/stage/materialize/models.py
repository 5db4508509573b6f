"""Models that are cut without memory, for the tests that give their stages values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipecut import Pipe, PipelineStage, Schedule1F1B, SplitPoint, pipeline

VOCABULARY, WIDTH = 11, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x)))


class Tied(nn.Module):
    """An embedding that is the head too, a table that is not saved, and statistics that are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.table
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


SPLIT = {"blocks.1": SplitPoint.BEGINNING, "blocks.3": SplitPoint.BEGINNING, "head": SplitPoint.BEGINNING}
TOKENS = torch.arange(6) % VOCABULARY
TARGET = (torch.arange(6) + 3) % VOCABULARY


def real_model() -> Tied:
    """With values in every tensor that no constructor gives."""
    torch.manual_seed(5)
    model = Tied()
    with torch.no_grad():
        for tensor in (*model.parameters(), *(block.norm.running_mean for block in model.blocks)):
            tensor.normal_()  # type: ignore[operator]
    return model


def cut(model: nn.Module, split: dict[str, SplitPoint] | None = None) -> Pipe:
    return pipeline(model, (TOKENS,), split_spec=split or SPLIT)


def build_all(pipe: Pipe, **values: Any) -> list[PipelineStage]:
    return [pipe.build_stage(index, "cpu", **values) for index in range(pipe.num_stages)]


def assert_trains_like(stages: Sequence[PipelineStage], uncut: nn.Module) -> None:
    """A step of the stages gives every gradient and buffer of the uncut model, by name."""
    uncut = copy.deepcopy(uncut)
    # Batch norm needs the whole batch at once.
    Schedule1F1B(list(stages), n_microbatches=1, loss_fn=nn.functional.cross_entropy).step(TOKENS, target=TARGET)
    nn.functional.cross_entropy(uncut(TOKENS), TARGET).backward()
    gradients = {name: parameter.grad for name, parameter in uncut.named_parameters(remove_duplicate=False)}
    buffers = dict(uncut.named_buffers())
    seen = set()
    for stage in stages:
        for name, parameter in stage.submod.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7, msg=name)
            seen.add(name)
        for name, buffer in stage.submod.named_buffers():
            torch.testing.assert_close(buffer, buffers[name], msg=name)
    assert seen == set(gradients)
