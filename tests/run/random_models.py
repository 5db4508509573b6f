"""A model that draws random numbers everywhere, traced or cut by hand, beside the uncut one that draws the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import Pipe, PipelineStage, SplitPoint, pipeline, random_streams
from pipecut.schedule import Plan
from tests.support.training import Gradients, Problem, Result, gradients_of

WIDTH = 6


class NoisyBlock(nn.Module):
    """Dropout, and numbers that are drawn by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.layer(x)))
        return x + 0.1 * torch.rand_like(x)


class Noisy(nn.Module):
    """Blocks, a skip over all of them, and dropout in the forward that is cut."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        first = x = F.dropout(x, 0.2, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), 0.2, self.training)
        return x + first


class NoisyChain(nn.Sequential):
    """Blocks, each a stage that is cut by hand."""

    def __init__(self, blocks: int) -> None:
        super().__init__(*(NoisyBlock() for _ in range(blocks)))


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws too."""
    return F.mse_loss(F.dropout(output, 0.3), target)


@functools.cache
def noisy_pipe(stages: int) -> Pipe:
    """A Noisy, cut before each block but the first."""
    torch.manual_seed(stages)
    spec = {f"blocks.{index}": SplitPoint.BEGINNING for index in range(1, stages)}
    return pipeline(Noisy(stages).double(), (torch.randn(3, WIDTH, dtype=torch.float64),), split_spec=spec)


@functools.cache
def noisy_chain(stages: int) -> NoisyChain:
    torch.manual_seed(stages)
    return NoisyChain(stages).double()


def noisy_model(stages: int, traced: bool) -> nn.Module:
    return noisy_pipe(stages).traced.model if traced else noisy_chain(stages)


def noisy_stages(plan: Plan, traced: bool, rank: int | None = None) -> list[PipelineStage]:
    """The stages of a rank, or all of them."""
    mine = range(plan.stages) if rank is None else plan.placement.stages_of[rank]
    if traced:
        return [noisy_pipe(plan.stages).build_stage(index, "cpu") for index in mine]
    chain = noisy_chain(plan.stages)
    return [PipelineStage(chain[index], index, plan.stages, "cpu") for index in mine]


def noisy_problem(model: nn.Module, samples: int) -> Problem:
    numbers = torch.Generator().manual_seed(samples)
    x, y = (torch.randn(samples, WIDTH, dtype=torch.float64, generator=numbers) for _ in range(2))
    return Problem(model, (x,), y, noisy_loss)


def by_microbatches(problem: Problem, sizes: Sequence[int], times: int = 1) -> Result:
    """The uncut model on one microbatch after the other, each with its stream of random numbers."""
    model = copy.deepcopy(problem.model)
    model.zero_grad(set_to_none=True)
    (x,), total = problem.args, sum(sizes)
    for _ in range(times):
        loss, outputs = 0.0, []
        parts = zip(random_streams(len(sizes)), x.split(list(sizes)), problem.target.split(list(sizes)), strict=True)
        for stream, part, target in parts:
            with stream:
                outputs.append(model(part))
                weighed = problem.loss_fn(outputs[-1], target) * (len(part) / total)
            weighed.backward()
            loss += weighed.item()
    return Result(torch.cat(outputs).detach(), loss, gradients_of(model), [])


def largest_difference(one: Gradients, other: Gradients) -> float:
    """Over all parameters."""
    assert one.keys() == other.keys()
    return max((mine - other[name]).abs().max().item() for name, mine in one.items() if mine is not None)  # type: ignore[operator]
