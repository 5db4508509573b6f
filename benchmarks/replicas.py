"""Pipelines side by side: predicted and executed steps of two pipelines of two local ranks, under both wrappers.

The layers wait as for a device of their own, for four ranks have two cores or so here; the collectives are gloo's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import pipecut

from .measure import Goal, show_table
from .prediction import WARM_UP, Device

RANKS, REPLICAS, BATCH, MICROBATCH, STEPS, LAYERS = 4, 2, 32, 4, 5, 8
WIDTH = 512  # of layers: a megabyte of parameters in each
LIMIT = 0.15


class Wide(Device):
    """A layer that waits, with parameters that take a while to average."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.scale = nn.Linear(WIDTH, WIDTH)


def run(rounds: int) -> Iterator[Goal]:
    """Plan with times measured together, run, compare."""
    rows = []
    for wrapper in ("ddp", "fully_shard"):
        found = [pipecut.launch(_one, RANKS, wrapper)[0] for _ in range(min(rounds, 3))]
        predicted, executed, collectives = (statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(after / before for before, after, _ in found)
        numbers = [f"{1000 * each:.1f}" for each in (predicted, executed, collectives)]
        rows.append([f"{REPLICAS} x {RANKS // REPLICAS}, {wrapper}", *numbers, f"{ratio:.3f}"])
        yield Goal(f"{REPLICAS} pipelines under {wrapper}: prediction off by", abs(ratio - 1), LIMIT)
    columns = ["pipelines", "predicted, ms", "executed, ms", "of it collectives, predicted", "ratio"]
    show_table("a step of two pipelines of two ranks", columns, rows)


def _one(wrapper: str) -> tuple[float, float, float]:
    """Run on each rank: predicted and executed seconds of a step, and those of its collectives."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide(0.002 * (1 + nth % 2)) for nth in range(LAYERS)))
    plan = pipecut.plan(
        model, torch.ones(MICROBATCH, WIDTH), ranks=RANKS, batch=BATCH, microbatch=MICROBATCH, replicas=REPLICAS,
        wrapper=wrapper, schedules=["1F1B"], recompute=False, cost="measured", group=dist.group.WORLD, time_budget=0.0,
    )  # fmt: skip
    schedule = plan.build(dist.get_rank(), loss_fn=nn.functional.mse_loss)
    x = torch.randn(BATCH // REPLICAS, WIDTH)
    first, last = (any(getattr(stage, end) for stage in schedule.stages) for end in ("is_first", "is_last"))
    times = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        begin = time.perf_counter()
        schedule.step(*((x,) if first else ()), target=x if last else None, return_outputs=False)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    collectives = plan.report.costs.collective_times(plan.schedule_plan)
    return plan.step_time, statistics.median(times[WARM_UP:]), max(map(sum, zip(*collectives.values(), strict=True)))
