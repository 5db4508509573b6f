"""Whether plans come true: predicted step times beside executed ones on local ranks, for every schedule."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipecut
from pipecut import TrainingPlan
from pipecut.planning.choices import TRAINING

from .measure import Goal, show_goals, show_table

WIDTH, BLOCKS, BATCH, MICROBATCH, RANKS = 384, 8, 1024, 128, 2
WARM_UP, STEPS = 2, 5
APART = 1.10  # pairs of schedules whose executed times differ by less are not counted


class Block(nn.Module):
    """Compute-bound: wide products, little else."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def run(rounds: int) -> None:
    """Plan with measured costs, run, compare."""
    predicted, executed = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in TRAINING:
            planned = pipecut.plan(
                model(), torch.ones(MICROBATCH, WIDTH), ranks=RANKS, batch=BATCH, microbatch=MICROBATCH,
                schedules=[name], recompute=False, cost="measured", time_budget=0.0,
            )  # fmt: skip
            path = str(Path(folder) / f"{name}.json")
            planned.save(path)
            predicted[name] = planned.step_time
            executed[name] = statistics.median(pipecut.launch(_steps, RANKS, path, rounds)[0])
    rows = [
        [
            name,
            f"{1000 * predicted[name]:.1f}",
            f"{1000 * executed[name]:.1f}",
            f"{executed[name] / predicted[name]:.3f}",
        ]
        for name in TRAINING
    ]
    title = f"a step of {BLOCKS} blocks on {RANKS} ranks ({os.cpu_count()} cores)"
    show_table(title, ["schedule", "predicted, ms", "executed, ms", "ratio"], rows)
    goals = [Goal(f"{name}: off by", abs(executed[name] / predicted[name] - 1), 0.10) for name in TRAINING]
    pairs = [
        (one, other)
        for one, other in itertools.combinations(TRAINING, 2)
        if max(executed[one], executed[other]) > APART * min(executed[one], executed[other])
    ]
    if pairs:
        wrong = [
            pair
            for pair in pairs
            if (predicted[pair[0]] < predicted[pair[1]]) != (executed[pair[0]] < executed[pair[1]])
        ]
        goals.append(Goal(f"the faster of two, {len(pairs)} pairs: part foretold wrong", len(wrong) / len(pairs), 0.10))
    show_goals(goals)


def _steps(path: str, rounds: int) -> list[float]:
    """What each rank does: seconds of steps."""
    rank = dist.get_rank()
    schedule = TrainingPlan.load(path, model(), torch.ones(MICROBATCH, WIDTH)).build(
        rank, loss_fn=nn.functional.mse_loss
    )
    x, y = torch.randn(2, BATCH, WIDTH)
    inputs = (x,) if any(stage.is_first for stage in schedule.stages) else ()
    target = y if any(stage.is_last for stage in schedule.stages) else None
    times = []
    for _ in range(WARM_UP + STEPS * rounds):
        dist.barrier()
        begin = time.perf_counter()
        schedule.step(*inputs, target=target, return_outputs=False)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return times[WARM_UP:]
