"""Steps in which one rank does something wrong: each function runs on every rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, PlannedSchedule, pipe_split, pipeline
from pipecut.schedule import plan_for
from tests.run.distributed.failing_models import SAMPLES, WIDTH, Party, die, fail, nth
from tests.support.limits import PATIENCE


def fails_in_forward(rank: int, world: int, traced: bool, stage: int, name: str) -> None:
    party = Party(rank, world, traced, name)
    if inner := party.inner(stage):
        inner.forward_trap = nth(2, fail)
    party.schedule().step(*party.args, target=party.target)


def fails_in_backward(rank: int, world: int, traced: bool, stage: int) -> None:
    """Twice, for a rank may have finished its first step when another fails in it."""
    party = Party(rank, world, traced)
    if inner := party.inner(stage):
        inner.backward_trap = nth(2, fail)
    schedule = party.schedule()
    for _ in range(2):
        schedule.step(*party.args, target=party.target)


def fails_in_weight_gradient(rank: int, world: int, traced: bool, stage: int) -> None:
    party = Party(rank, world, traced, "ZB-H1")
    if inner := party.inner(stage):
        trap = nth(2, fail)
        inner.linear.weight.register_post_accumulate_grad_hook(lambda parameter: trap())
    schedule = party.schedule()
    for _ in range(2):
        schedule.step(*party.args, target=party.target)


def fails_in_loss(rank: int, world: int, traced: bool) -> None:
    party = Party(rank, world, traced)
    trap = nth(2, fail)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        trap()
        return F.mse_loss(output, target)

    party.schedule(loss_fn).step(*party.args, target=party.target)


def is_killed(rank: int, world: int, traced: bool, victim: int, trap: str) -> None:
    party = Party(rank, world, traced)
    schedule = party.schedule()
    schedule.step(*party.args, target=party.target)
    if inner := party.inner(victim):
        setattr(inner, trap, nth(2, die))
    for _ in range(2):
        schedule.step(*party.args, target=party.target)


def differs(rank: int, world: int, traced: bool, what: str) -> None:
    """Rank 1 has another schedule, number of microbatches or option."""
    other = rank == 1
    name = "GPipe" if what == "schedule" and other else "1F1B"
    party = Party(rank, world, traced, name, microbatches=6 if what == "microbatches" and other else 4)
    options = {"scale_grads": not (what == "scale_grads" and other)}
    party.schedule(**options).step(*party.args, target=party.target)


class Narrow(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, width, dtype=dtype), nn.Linear(width, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        return self.b(x)


class Other(Narrow):
    """The same, under another name."""


def has_another_model(rank: int, what: str) -> None:
    width = 6 if what == "width" and rank == 1 else 8
    dtype = torch.float64 if what == "dtype" and rank == 1 else torch.float32
    model = (Other if what == "class" and rank == 1 else Narrow)(width, dtype)
    if what == "layer" and rank == 1:
        model.b = nn.Sequential(model.b, nn.Tanh())  # type: ignore[assignment]
    x = torch.randn(SAMPLES, WIDTH, dtype=dtype)
    pipe = pipeline(model, (x,))
    schedule = PlannedSchedule([pipe.build_stage(rank, "cpu")], plan_for("1F1B", ranks=2, microbatches=4), F.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), target=x if rank == 1 else None)


def has_another_shape_by_hand(rank: int, what: str) -> None:
    first = nn.Linear(WIDTH, 6) if what == "width" else nn.Linear(WIDTH, 8).double()
    stage = PipelineStage((first, nn.Linear(8, WIDTH))[rank], rank, 2, "cpu")
    x = torch.randn(SAMPLES, WIDTH, dtype=first.weight.dtype)
    schedule = PlannedSchedule([stage], plan_for("1F1B", ranks=2, microbatches=4), F.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), target=x if rank == 1 else None)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        pipe_split()
        return self.head(x)


def has_another_seed(rank: int) -> None:
    torch.manual_seed(rank)
    model = Tied()
    ids = torch.zeros(SAMPLES, 3, dtype=torch.long)
    pipe = pipeline(model, (ids,))
    schedule = PlannedSchedule(
        [pipe.build_stage(rank, "cpu")], plan_for("1F1B", ranks=2, microbatches=4), lambda output, _: output.mean()
    )
    schedule.step(*((ids,) if rank == 0 else ()), target=ids if rank == 1 else None)


AWAY = 4.0 * PATIENCE  # seconds that the others wait for a rank that does not come


def stays_away(rank: int, world: int, traced: bool, who: int) -> str:
    party = Party(rank, world, traced)
    schedule = party.schedule(timeout=AWAY)
    dist.barrier()  # so that all others come at about the same time
    if rank != who:
        schedule.step(*party.args, target=party.target)
    return "stayed away"


def stays_away_later(rank: int, world: int, traced: bool, who: int) -> str:
    party = Party(rank, world, traced)
    schedule = party.schedule()
    schedule.step(*party.args, target=party.target)
    if rank != who:
        schedule.step(*party.args, target=party.target)
    return "stayed away"


def ends(rank: int, world: int, traced: bool, who: int) -> None:
    party = Party(rank, world, traced)
    schedule = party.schedule()
    schedule.step(*party.args, target=party.target)
    if rank == who:
        os._exit(0)
    schedule.step(*party.args, target=party.target)


def is_too_slow(rank: int, world: int, folder: Path) -> None:
    """Rank 1 does not go on before all others have given up."""

    def wait_for_others() -> None:
        while len(list(folder.iterdir())) < world - 1:
            time.sleep(0.05)

    party = Party(rank, world, traced=False)
    schedule = party.schedule()
    schedule.step(*party.args, target=party.target)
    if inner := party.inner(1):
        inner.forward_trap = nth(2, wait_for_others)
    try:
        schedule.step(*party.args, target=party.target)
    finally:
        (folder / str(rank)).touch()


def calls(rank: int, world: int, traced: bool, what: str) -> Any:
    """Something is wrong with the call on one of the ranks."""
    party = Party(rank, world, traced)
    schedule = party.schedule((lambda output, target: output - target) if what == "loss of rows" else F.mse_loss)
    args, target, method = party.args, party.target, schedule.step
    if what == "NaN" and target is not None:
        target[5] = float("nan")
    elif what == "no target":
        target = None
    elif what == "no input":
        args = ()
    elif what == "two inputs":
        args = args * 2
    elif what == "no samples":
        args = tuple(value[:0] for value in args)
    elif what == "other target" and target is not None:
        target = target[:7]
    elif what == "eval on the first" and rank == 0 or what == "eval on the last" and rank == world - 1:
        method = schedule.eval
    elif what == "no loss":
        return schedule.mean_loss()
    method(*args, target=target)
    return schedule.mean_loss()


def swaps_schedules(rank: int, world: int, traced: bool) -> None:
    """Two schedules of the same stages, called in another order on one rank; one has many microbatches."""
    party = Party(rank, world, traced)
    party.x, party.y = party.x.repeat(13, 1), party.y.repeat(13, 1)
    many = PlannedSchedule(party.stages, plan_for("1F1B", ranks=world, microbatches=100), F.mse_loss)
    schedules = [many, party.schedule()]
    for schedule in schedules:
        schedule.step(*party.args, target=party.target)
    for schedule in schedules if rank == 0 else reversed(schedules):
        schedule.step(*party.args, target=party.target)


class Flat(nn.Linear):
    """Its output has no rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(0)


def returns_no_rows(rank: int) -> None:
    stage = PipelineStage((nn.Linear(WIDTH, WIDTH), Flat(WIDTH, WIDTH))[rank], rank, 2, "cpu")
    x = torch.randn(SAMPLES, WIDTH)
    plan = plan_for("1F1B", ranks=2, microbatches=4)
    schedule = PlannedSchedule([stage], plan, lambda output, target: output.square().mean())
    for _ in range(2):
        schedule.step(*((x,) if rank == 0 else ()), target=x if rank == 1 else None)


class Scaled(nn.Linear):
    """Takes a keyword of any number of rows."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale.mean()


def passes_other_keywords(rank: int) -> None:
    stage = PipelineStage(Scaled(WIDTH, WIDTH), rank, 2, "cpu")
    x, scale = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES + 4 * rank, WIDTH)
    schedule = PlannedSchedule([stage], plan_for("1F1B", ranks=2, microbatches=4), F.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), scale=scale, target=x if rank == 1 else None)
