"""Whether plans come true: predicted step times and memory beside executed ones on local ranks, for every schedule."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipecut
from pipecut import TrainingPlan
from pipecut.planning.choices import TRAINING

from .measure import Goal, show_goals, show_table

BATCH, MICROBATCH = 1024, 128
WARM_UP, STEPS = 2, 5
APART = 1.10  # pairs of schedules whose executed times differ by less are not counted


class Block(nn.Module):
    """Compute-bound: wide products, little else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


class _Busy(torch.autograd.Function):
    """Takes its time without the core of a CPU, as a device of its own would."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)  # type: ignore[attr-defined]
        return gradient, None


class Device(nn.Module):
    """A layer that waits, of a length of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.scale = seconds, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return _Busy.apply(self.scale(x), self.seconds)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True)
class Load:
    """What is planned and run."""

    title: str
    ranks: int
    width: int
    model: Callable[[], nn.Module]


def computing() -> nn.Module:
    """Blocks that multiply."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(640) for _ in range(8)))


def waiting() -> nn.Module:
    """Blocks that wait, uneven ones."""
    torch.manual_seed(0)
    return nn.Sequential(*(Device(0.001 * (2 + nth % 3)) for nth in range(16)))


LOADS = (
    Load("8 blocks that multiply, on 2 ranks", 2, 640, computing),
    Load("16 layers that wait as for a device of their own, on 4 ranks", 4, 32, waiting),
)


def run(rounds: int) -> Iterator[Goal]:
    """Plan with measured costs, run, compare."""
    for load in LOADS:
        found = pipecut.launch(_rounds, load.ranks, load, rounds, timeout=1200)[0]
        times = {name: [each[name] for each in found] for name in found[0]}
        predicted = {name: statistics.median(one for one, _ in pairs) for name, pairs in times.items()}
        executed = {name: statistics.median(other for _, other in pairs) for name, pairs in times.items()}
        rows = [
            [
                name,
                f"{1000 * predicted[name]:.1f}",
                f"{1000 * executed[name]:.1f}",
                f"{_ratio(times[name]):.3f}",
            ]
            for name in times
        ]
        title = f"a step of {load.title} ({os.cpu_count()} cores)"
        show_table(title, ["schedule", "predicted, ms", "executed, ms", "ratio"], rows)
        yield from show_goals([*_goals(times), *_pairs(predicted, executed)])
    yield from _show_memory(LOADS[0])


Pairs = dict[str, list[tuple[float, float]]]


def _ratio(pairs: list[tuple[float, float]]) -> float:
    """Executed to predicted; both of a round were seen one right after the other."""
    return statistics.median(executed / predicted for predicted, executed in pairs)


def _goals(times: Pairs) -> list[Goal]:
    return [Goal(f"{name}: off by", abs(_ratio(pairs) - 1), 0.10) for name, pairs in times.items()]


def _pairs(predicted: dict[str, float], executed: dict[str, float]) -> list[Goal]:
    """Which of two is faster, for all that are far enough apart."""
    apart = [
        (one, other)
        for one, other in itertools.combinations(predicted, 2)
        if max(executed[one], executed[other]) > APART * min(executed[one], executed[other])
    ]
    wrong = [
        pair for pair in apart if (predicted[pair[0]] < predicted[pair[1]]) != (executed[pair[0]] < executed[pair[1]])
    ]
    if not apart:
        return []
    return [Goal(f"the faster of two, {len(apart)} pairs: part predicted wrong", len(wrong) / len(apart), 0.10)]


def _show_memory(load: Load) -> list[Goal]:
    """The most memory of each rank: parameters, gradients, what Adam keeps, and activations."""
    rows, goals = [], []
    for name, recompute in itertools.product(TRAINING, (False, True)):
        predicted, executed = zip(*pipecut.launch(_memory, load.ranks, load, name, recompute), strict=True)
        off = max(abs(seen / said - 1) for said, seen in zip(predicted, executed, strict=True))
        texts = [", ".join(f"{size / 2**20:.1f}" for size in sizes) for sizes in (predicted, executed)]
        rows.append([name, "yes" if recompute else "no", *texts, f"{off:.3f}"])
        goals.append(Goal(f"{name}{', recomputed' if recompute else ''}: memory off by", off, 0.15))
    columns = ["schedule", "recompute", "predicted, MB", "executed, MB", "off by"]
    show_table(f"memory of ranks: {load.title}", columns, rows)
    return show_goals(goals)


def _memory(load: Load, name: str, recompute: bool) -> tuple[float, float]:
    """What each rank does: predicted and seen bytes, at the most."""
    planned = pipecut.plan(
        load.model(), torch.ones(MICROBATCH, load.width), ranks=load.ranks, batch=BATCH, microbatch=MICROBATCH,
        schedules=[name], recompute=recompute, time_budget=0.0, machine=pipecut.Machine.nominal("cpu"),
    )  # fmt: skip
    schedule = planned.build(dist.get_rank(), loss_fn=nn.functional.mse_loss)
    parameters = [parameter for stage in schedule.stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.Adam(parameters)
    for nth in range(3):
        with torch.profiler.profile(profile_memory=True) if nth == 2 else contextlib.nullcontext() as profile:
            _step(load, schedule)
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(each.untyped_storage().nbytes() for each in [*parameters, *states])
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return planned.memory[dist.get_rank()], kept + max(itertools.accumulate(changes))


def _step(load: Load, schedule: Any) -> None:
    x, y = torch.ones(2, BATCH, load.width)
    inputs = (x,) if any(stage.is_first for stage in schedule.stages) else ()
    target = y if any(stage.is_last for stage in schedule.stages) else None
    schedule.step(*inputs, target=target, return_outputs=False)


def _rounds(load: Load, rounds: int) -> list[dict[str, tuple[float, float]]]:
    """What each rank does: predicted and executed seconds, for every schedule."""
    return [{name: _predicted_and_executed(load, name) for name in TRAINING} for _ in range(rounds)]


def _predicted_and_executed(load: Load, name: str) -> tuple[float, float]:
    planned = pipecut.plan(
        load.model(), torch.ones(MICROBATCH, load.width), ranks=load.ranks, batch=BATCH, microbatch=MICROBATCH,
        schedules=[name], recompute=False, cost="measured", time_budget=0.0, group=dist.group.WORLD,
    )  # fmt: skip
    return planned.step_time, _executed(load, planned)


def _executed(load: Load, planned: TrainingPlan) -> float:
    schedule = planned.build(dist.get_rank(), loss_fn=nn.functional.mse_loss)
    times = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        begin = time.perf_counter()
        _step(load, schedule)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])
