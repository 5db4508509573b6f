"""Time of a training step beside upstream's: both schedules in the same processes, step by step in turn.

Overhead-bound stages have tiny layers: what is measured is the schedule itself. Compute-bound ones have large layers.
The step is also compared with what the simulator says for the measured costs of the computations.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import get_schedule_class as upstream_schedule_class

import pipecut
from pipecut.schedule import Costs, Op, Plan, Timeline, plan_for, simulate

from .measure import Goal, show_goals, show_table

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
RANKS, MICROBATCHES = (2, 4), (16, 64)
WARM_UP = 2


@dataclass(frozen=True)
class Load:
    """What a stage computes: layers of a width, and the rows of a microbatch."""

    name: str
    width: int
    layers: int
    rows: int
    limit: float  # of upstream's time


OVERHEAD = Load("overhead-bound", width=16, layers=2, rows=4, limit=0.6)
COMPUTE = Load("compute-bound", width=512, layers=2, rows=64, limit=1.0)


@dataclass(frozen=True)
class Setting:
    """One comparison."""

    schedule: str
    chunks: int
    microbatches: int
    load: Load


@dataclass(frozen=True)
class Result:
    """Seconds of every round, and the makespan that the simulator gives for the measured costs."""

    ours: list[float]
    upstream: list[float]
    simulated: float


def run(rounds: int) -> Iterator[Goal]:
    """Measure all settings, print the table and the goals."""
    rows, goals = [], []
    for ranks in RANKS:
        settings = [
            Setting(name, chunks, microbatches, load)
            for load in (OVERHEAD, COMPUTE)
            for name, chunks in SCHEDULES.items()
            for microbatches in MICROBATCHES
            if load is OVERHEAD or microbatches == MICROBATCHES[0]
        ]
        for setting, result in zip(settings, pipecut.launch(_compare, ranks, settings, rounds)[0], strict=True):
            ratio = statistics.median(
                ours / upstream for ours, upstream in zip(result.ours, result.upstream, strict=True)
            )
            simulated = statistics.median(result.ours) / result.simulated
            what = f"{setting.schedule}, {ranks} ranks, {setting.microbatches} microbatches, {setting.load.name}"
            times = [f"{1000 * statistics.median(each):.1f}" for each in (result.ours, result.upstream)]
            rows.append([what, *times, f"{ratio:.3f}", f"{simulated:.2f}"])
            goals.append(Goal(what, ratio, setting.load.limit))
    columns = ["setting", "pipecut, ms", "upstream, ms", "ratio", "of the simulated time"]
    show_table(f"a training step, medians of {rounds} rounds", columns, rows)
    yield from show_goals(goals)


def _compare(settings: list[Setting], rounds: int) -> list[Result]:
    """What each rank does: both schedules of every setting, a step of each in turn."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return [_compare_one(setting, rounds) for setting in settings]


def _compare_one(setting: Setting, rounds: int) -> Result:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    load, stages = setting.load, ranks * setting.chunks
    torch.manual_seed(0)
    model = nn.Sequential(*(layers_of(load) for _ in range(stages)))
    x, y = torch.randn(2, load.rows * setting.microbatches, load.width)
    plan = plan_for(setting.schedule, ranks=ranks, chunks=setting.chunks, microbatches=setting.microbatches)
    held = plan.placement.stages_of[rank]
    ours = our_schedule(setting, [copy.deepcopy(model[stage]) for stage in held], held, stages)
    upstream = upstream_schedule(setting, [copy.deepcopy(model[stage]) for stage in held], held, stages)
    inputs = (x,) if 0 in held else ()
    target = {"target": y} if stages - 1 in held else {}
    times: dict[str, list[float]] = {"ours": [], "upstream": []}
    sides: dict[str, Any] = {"ours": ours, "upstream": upstream}
    for nth in range(rounds + WARM_UP):
        for name in ("ours", "upstream") if nth % 2 else ("upstream", "ours"):
            seconds = _timed(lambda name=name: sides[name].step(*inputs, **target))
            if nth >= WARM_UP:
                times[name].append(seconds)
    ours.tracing = True
    ours.step(*inputs, **target)
    return Result(times["ours"], times["upstream"], _simulated(plan, ours.trace()))


def layers_of(load: Load) -> nn.Module:
    """Make the layers of one stage."""
    return nn.Sequential(*(part for _ in range(load.layers) for part in (nn.Linear(load.width, load.width), nn.ReLU())))


def our_schedule(setting: Setting, modules: list[nn.Module], held: tuple[int, ...], stages: int) -> Any:
    """Make pipecut's schedule of a setting."""
    made = [pipecut.PipelineStage(module, index, stages, "cpu") for module, index in zip(modules, held, strict=True)]
    schedule: Any = pipecut.get_schedule_class(setting.schedule)
    return schedule(made if setting.chunks > 1 else made[0], setting.microbatches, nn.functional.mse_loss)


def upstream_schedule(setting: Setting, modules: list[nn.Module], held: tuple[int, ...], stages: int) -> Any:
    """Make upstream's schedule of a setting."""
    device = torch.device("cpu")
    made = [
        pipelining.PipelineStage(module, index, stages, device) for module, index in zip(modules, held, strict=True)
    ]
    schedule = upstream_schedule_class(setting.schedule)
    return schedule(made if setting.chunks > 1 else made[0], setting.microbatches, nn.functional.mse_loss)


def _timed(step: Callable[[], object]) -> float:
    """A step from when all ranks begin until all are done."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


def _simulated(plan: Plan, executed: Timeline) -> float:
    """The makespan for the median times of every computation on its stage."""
    gathered: list[Any] = [None] * dist.get_world_size()
    own = [(span.action.op, span.action.stage, span.end - span.start) for span in executed if span.action.is_compute]
    dist.all_gather_object(gathered, own)
    times: dict[tuple[Op, int], list[float]] = {}
    for op, stage, seconds in (entry for part in gathered for entry in part):
        times.setdefault((op, stage), []).append(seconds)
    median = {key: statistics.median(values) for key, values in times.items()}
    by_stage = {op: [median.get((op, stage), 0.0) for stage in range(plan.stages)] for op in Op}
    costs = Costs(
        forward=by_stage[Op.FORWARD],
        backward_input=by_stage[Op.BACKWARD_INPUT],
        backward_weight=by_stage[Op.BACKWARD_WEIGHT],
        full_backward=by_stage[Op.FULL_BACKWARD] if any(by_stage[Op.FULL_BACKWARD]) else None,
    )
    return simulate(plan, costs).makespan
