"""What ranks do in the tests of failures: steps in which one of them does something wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, PlannedSchedule, SplitPoint, pipeline
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import plan_for

WIDTH, SAMPLES = 4, 8


class Trap(torch.autograd.Function):
    """The identity; its backward does what the trap says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spring: Callable[[], None]) -> Tensor:
        ctx.spring = spring
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.spring()
        return gradient, None


class Inner(nn.Module):
    """A layer that does something in the forward or backward of a microbatch, counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward_trap: Callable[[], None] | None = None
        self.backward_trap: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_trap is not None:
            self.forward_trap()
        x = torch.tanh(self.linear(x))
        return x if self.backward_trap is None else Trap.apply(x, self.backward_trap)


class Layer(nn.Module):
    """A module with the one that may fail inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Net(nn.Module):
    """Layers, each a stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def nth(count: int, action: Callable[[], None]) -> Callable[[], None]:
    """Does it at the call of this number, counted from 0."""
    calls = iter(range(1000))

    def spring() -> None:
        if next(calls) == count:
            action()

    return spring


def fail() -> None:
    raise ValueError("this layer fails on purpose")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Party:
    """One rank of a small pipeline: its stages, and a schedule to be made and run."""

    def __init__(self, rank: int, world: int, traced: bool, name: str = "1F1B", microbatches: int = 4) -> None:
        self.rank, self.world = rank, world
        self.plan = plan_for(name, ranks=world, microbatches=microbatches)
        self.net = Net(self.plan.stages)
        mine = self.plan.placement.stages_of[rank]
        self.x, self.y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
        if traced:
            spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, self.plan.stages)}
            pipe = pipeline(self.net, (self.x,), split_spec=spec)
            self.stages = [pipe.build_stage(index, "cpu") for index in mine]
        else:
            self.stages = [PipelineStage(self.net.layers[i], i, self.plan.stages, "cpu") for i in mine]

    def inner(self, stage: int) -> Inner | None:
        """The layer that may fail, if this rank has it."""
        for held in self.stages:
            for module in held.submod.modules():
                if held.stage_index == stage and isinstance(module, Inner):
                    return module
        return None

    def schedule(self, loss_fn: Callable[..., Tensor] = F.mse_loss, **options: Any) -> PipelineSchedule:
        return PlannedSchedule(self.stages, self.plan, loss_fn, **options)

    @property
    def args(self) -> tuple[Tensor, ...]:
        return (self.x,) if self.rank == self.plan.placement.rank_of[0] else ()

    @property
    def target(self) -> Tensor | None:
        return self.y if self.rank == self.plan.placement.rank_of[-1] else None
