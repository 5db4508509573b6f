"""Mixed precision as in the uncut model: autocast around steps, and bfloat16 parameters with float32 copies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipelineStage, Schedule1F1B, clip_grad_norm_, pipeline
from tests.support.ranks import Ranks

WIDTH, MICROBATCHES = 8, 2
X, Y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))

Make = Callable[[nn.Sequential, list[int]], list[PipelineStage]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def traced(model: nn.Sequential, indices: list[int]) -> list[PipelineStage]:
    pipe = pipeline(model, (X.to(model.get_parameter("0.0.weight").dtype),), num_stages=2)
    return [pipe.build_stage(index, "cpu") for index in indices]


def by_hand(model: nn.Sequential, indices: list[int]) -> list[PipelineStage]:
    return [PipelineStage(model[index], index, 2, "cpu") for index in indices]


def scheduled(model: nn.Sequential, make: Make, rank: int | None) -> Schedule1F1B:
    stages = make(model, [0, 1] if rank is None else [rank])
    return Schedule1F1B(stages if rank is None else stages[0], MICROBATCHES, loss_fn)


def step(schedule: Schedule1F1B, rank: int | None, x: Tensor = X) -> float:
    schedule.step(*((x,) if rank in (None, 0) else ()), **({"target": Y} if rank in (None, 1) else {}))
    return schedule.mean_loss()


def step_uncut(model: nn.Module, x: Tensor = X) -> float:
    total = 0.0
    for part, target in zip(x.chunk(MICROBATCHES), Y.chunk(MICROBATCHES), strict=True):
        loss = loss_fn(model(part), target) / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total


def note_gradient(dtypes: list[torch.dtype], module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: dtypes.append(gradient.dtype))


def has_the_bits_of_autocast(rank: int | None, make: Make, dtype: torch.dtype) -> None:
    model = network()
    uncut = copy.deepcopy(model)
    crossing: list[torch.dtype] = []
    with torch.autocast("cpu", dtype):
        schedule = scheduled(model, make, rank)
        for stage in schedule.stages:
            if stage.is_first:
                stage.submod.register_forward_hook(functools.partial(note_gradient, crossing))
        for _ in range(2):
            assert step(schedule, rank) == step_uncut(uncut)
    wanted = dict(uncut.named_parameters())
    for stage in schedule.stages:
        prefix = "" if stage.pipe_info is not None else f"{stage.stage_index}."
        for name, parameter in stage.submod.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert torch.equal(parameter.grad, wanted[prefix + name].grad), name  # type: ignore[arg-type]
    # A gradient goes back to the stage before in the dtype of the value that came from there.
    assert crossing == ([dtype] * 2 * MICROBATCHES if rank in (None, 0) else [])


@pytest.mark.parametrize("make", [traced, by_hand])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_steps_in_one_process(make: Make, dtype: torch.dtype) -> None:
    has_the_bits_of_autocast(None, make, dtype)


@pytest.mark.distributed
@pytest.mark.parametrize("make", [traced, by_hand])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_steps_on_ranks(two_ranks: Ranks, make: Make, dtype: torch.dtype) -> None:
    two_ranks.run(has_the_bits_of_autocast, make, dtype)


# Parameters in bfloat16 whose float32 copies an optimizer of the user's choice updates.


class MasterWeights:
    """Gives an optimizer float32 copies of parameters, and the parameters what it makes of them."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(each.detach().float()) for each in self.parameters]
        self.optimizer = make(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
            parameter.grad = None


def small_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def trains_in_bfloat16(rank: int | None, make: Make) -> list[float]:
    model = network().bfloat16()
    uncut, x = copy.deepcopy(model), X.bfloat16()
    schedule = scheduled(model, make, rank)
    mine, theirs = MasterWeights(schedule.parameters(), small_adamw), MasterWeights(uncut.parameters(), small_adamw)
    losses = []
    for _ in range(8):
        losses.append(step(schedule, rank, x))
        assert losses[-1] == step_uncut(uncut, x)
        norm = clip_grad_norm_(schedule, 0.1)
        assert norm.dtype == torch.bfloat16
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(uncut.parameters(), 0.1))
        mine.step()
        theirs.step()
    first = 0 if rank in (None, 0) else len(theirs.masters) // 2
    for own, other in zip(mine.masters, theirs.masters[first:], strict=rank != 0):
        assert torch.equal(own, other)
    return losses


@pytest.mark.parametrize("make", [traced, by_hand])
def test_bfloat16_parameters_with_float32_copies(make: Make) -> None:
    losses = trains_in_bfloat16(None, make)
    assert losses[-1] < losses[0]


@pytest.mark.distributed
def test_bfloat16_parameters_with_float32_copies_on_ranks(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(trains_in_bfloat16, traced)
    assert first == last
