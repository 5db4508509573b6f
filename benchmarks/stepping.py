"""Time of a training step beside upstream's and beside the simulation: all in the same processes, steps in turn.

Overhead-bound stages have tiny layers: what is measured is the schedule itself. Compute-bound ones have large layers,
on as many ranks as there are cores; they are run as modules cut by hand, as upstream's are, and as a traced model. What
the simulator says for the measured times of their computations is a limit: messages take no time there. Schedules that
put off weight gradients are compared with 1F1B, executed and simulated.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import get_schedule_class as upstream_schedule_class

import pipecut
from pipecut.schedule import Costs, Op, Plan, Span, auto_schedule, plan_for, simulate

from .measure import Goal, median_ratio, milliseconds, show_goals, show_table

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
RANKS, MICROBATCHES = (2, 4), 16
ROUNDS_FOR_EACH = 3
WARM_UP, TRACED_STEPS = 2, 3
OF_SIMULATED, OF_GAIN = 1.1, 1.03
SEARCH_SECONDS = 3.0
COMPUTED = (Op.FORWARD, Op.FULL_BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
HAND_CUT, TRACED, UPSTREAM = "pipecut", "pipecut, traced", "upstream"
FIRST, PUT_OFF, SEARCHED = "1F1B", "ZB-H1", "searched"


@dataclass(frozen=True)
class Load:
    """What a stage computes: layers of a width, and the rows of a microbatch."""

    name: str
    width: int
    layers: int
    rows: int
    limit: float  # of upstream's time


OVERHEAD = Load("overhead-bound", width=16, layers=2, rows=4, limit=0.6)
COMPUTE = tuple(Load(f"width {width}", width=width, layers=2, rows=64, limit=0.95) for width in (256, 512))
GAIN = Load("width 512", width=512, layers=4, rows=64, limit=0.95)


@dataclass(frozen=True)
class Setting:
    """One comparison."""

    schedule: str
    chunks: int
    microbatches: int
    load: Load


Times = dict[str, list[float]]  # seconds of every round, for each side
Computed = list[tuple[Op, int, float]]  # computations by kind and stage, with their seconds


@dataclass(frozen=True)
class Result:
    """Times, and the makespans that the simulator gives for the measured costs of some sides, of every round too."""

    times: Times
    simulated: Times


def run(rounds: int) -> Iterator[Goal]:
    """Measure all settings, print the tables and the goals."""
    rounds *= ROUNDS_FOR_EACH
    for ranks in RANKS:
        settings = [Setting(name, chunks, MICROBATCHES, OVERHEAD) for name, chunks in SCHEDULES.items()]
        yield from _show_steps(ranks, settings, rounds)
    for load in COMPUTE:
        settings = [Setting(name, chunks, MICROBATCHES, load) for name, chunks in SCHEDULES.items()]
        yield from _show_steps(RANKS[0], settings, rounds)
    yield from _show_gains(pipecut.launch(_compare_gains, RANKS[0], GAIN, rounds)[0], rounds)


def _show_steps(ranks: int, settings: list[Setting], rounds: int) -> list[Goal]:
    """Print the steps of one load, and return the goals."""
    load = settings[0].load
    results = pipecut.launch(_compare_all, ranks, settings, rounds)[0]
    rows, goals = [], []
    for setting, result in zip(settings, results, strict=True):
        ours, upstream = result.times[HAND_CUT], result.times[UPSTREAM]
        what = f"{setting.schedule}, {ranks} ranks, {load.name}"
        ratio, least = median_ratio(ours, upstream), min(ours) / min(upstream)
        goals.append(Goal(f"{what}: of upstream's time", ratio, load.limit))
        of_limit = {side: median_ratio(result.times[side], limits) for side, limits in result.simulated.items()}
        goals += [Goal(f"{what}: {side}, of the simulated time", each, OF_SIMULATED) for side, each in of_limit.items()]
        times = milliseconds(ours), milliseconds(upstream)
        rows.append(
            [setting.schedule, *times, f"{ratio:.3f}", f"{least:.3f}", *(f"{e:.3f}" for e in of_limit.values())]
        )
    columns = ["schedule", "pipecut, ms", "upstream, ms", "ratio", "of minima"]
    columns += [f"{side}, of simulated" for side in results[0].simulated]
    show_table(f"a step, {load.name}, {ranks} ranks, {MICROBATCHES} microbatches, {rounds} rounds", columns, rows)
    return show_goals(goals)


def _show_gains(result: Result, rounds: int) -> list[Goal]:
    """Print what schedules that put off weight gradients gain over 1F1B, and return the goals."""
    rows, goals = [], []
    for name in (PUT_OFF, SEARCHED):
        executed = median_ratio(result.times[name], result.times[FIRST])
        simulated = median_ratio(result.simulated[name], result.simulated[FIRST])
        rows.append([name, milliseconds(result.times[name]), f"{executed:.3f}", f"{simulated:.3f}"])
        goals.append(Goal(f"{name} beside 1F1B, {GAIN.name}: executed, of simulated", executed / simulated, OF_GAIN))
    columns = ["schedule", "ms", "of 1F1B's time, executed", "simulated"]
    show_table(f"gains over 1F1B, {GAIN.name}, {RANKS[0]} ranks, {rounds} rounds", columns, rows)
    return show_goals(goals)


# On each rank.


def _compare_all(settings: list[Setting], rounds: int) -> list[Result]:
    """Run on each rank: all sides of every setting, a step of each in turn."""
    _be_quiet()
    return [_compare(setting, rounds) for setting in settings]


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


def _compare(setting: Setting, rounds: int) -> Result:
    load, stages = setting.load, dist.get_world_size() * setting.chunks
    plan = plan_for(
        setting.schedule, ranks=dist.get_world_size(), chunks=setting.chunks, microbatches=setting.microbatches
    )
    model, held = _model(load, stages), plan.placement.stages_of[dist.get_rank()]
    modules = [model[stage] for stage in held]
    schedules = {HAND_CUT: our_schedule(setting, copy.deepcopy(modules), held, stages)}
    if load != OVERHEAD:
        schedules[TRACED] = _traced_schedule(setting, copy.deepcopy(model), held, stages)
    upstream = upstream_schedule(setting, copy.deepcopy(modules), held, stages)
    if load == OVERHEAD:
        return Result(_time_in_turn({**schedules, UPSTREAM: upstream}, load, held, stages, rounds), {})
    computed: dict[str, list[Computed]] = {name: [] for name in schedules}
    times = _time_in_turn({**schedules, UPSTREAM: upstream}, load, held, stages, rounds, computed)
    costs = {name: _costs_of(each, stages) for name, each in computed.items()}
    return Result(times, {name: [simulate(plan, one).makespan for one in each] for name, each in costs.items()})


def _compare_gains(load: Load, rounds: int) -> Result:
    """Run on each rank: 1F1B, ZB-H1 and the schedule that is found for the measured costs."""
    _be_quiet()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = _model(load, ranks)
    plans = {name: plan_for(name, ranks=ranks, microbatches=MICROBATCHES) for name in (FIRST, PUT_OFF)}
    schedules = {name: _planned_schedule(plan, copy.deepcopy(model[rank]), rank) for name, plan in plans.items()}
    _time_in_turn(schedules, load, (rank,), ranks, 1)  # warm-up
    costs = _measured_costs([*schedules.values()], load, (rank,), ranks)
    plans[SEARCHED] = auto_schedule(
        ranks=ranks, microbatches=MICROBATCHES, costs=costs, placement="loop", chunks=1, time_budget=SEARCH_SECONDS,
        verbose=False,
    )  # fmt: skip
    shared = [plans[SEARCHED]]
    dist.broadcast_object_list(shared)
    plans[SEARCHED] = shared[0]
    schedules[SEARCHED] = _planned_schedule(plans[SEARCHED], copy.deepcopy(model[rank]), rank)
    times = _time_in_turn(schedules, load, (rank,), ranks, 2 * rounds)
    costs = _measured_costs([*schedules.values()], load, (rank,), ranks)
    return Result(times, {name: [simulate(plan, costs).makespan] for name, plan in plans.items()})


def _time_in_turn(
    schedules: Mapping[str, Any],
    load: Load,
    held: tuple[int, ...],
    stages: int,
    rounds: int,
    computed: Mapping[str, list[Computed]] | None = None,
) -> Times:
    """Seconds of steps, from when all ranks begin until all are done, after some that do not count.

    Those in `computed` run another step each, under the same conditions, whose computations are added there.
    """
    names = list(schedules)
    times: Times = {name: [] for name in names}
    for nth in range(-WARM_UP, rounds):
        for name in names if nth % 2 else reversed(names):
            dist.barrier()
            begin = time.perf_counter()
            _step(schedules[name], load, held, stages)
            dist.barrier()
            if nth >= 0:
                times[name].append(time.perf_counter() - begin)
            if nth >= 0 and computed is not None and name in computed:
                computed[name].append(_computations(schedules[name], load, held, stages))
    return times


def _step(schedule: Any, load: Load, held: tuple[int, ...], stages: int) -> None:
    x, y = torch.ones(2, load.rows * MICROBATCHES, load.width)
    schedule.step(*((x,) if 0 in held else ()), **({"target": y} if stages - 1 in held else {}))


def _model(load: Load, stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layers_of(load) for _ in range(stages)))


def layers_of(load: Load) -> nn.Module:
    """Make the layers of one stage."""
    return nn.Sequential(*(part for _ in range(load.layers) for part in (nn.Linear(load.width, load.width), nn.ReLU())))


def our_schedule(setting: Setting, modules: list[nn.Module], held: tuple[int, ...], stages: int) -> Any:
    """Make pipecut's schedule of a setting."""
    made = [pipecut.PipelineStage(module, index, stages, "cpu") for module, index in zip(modules, held, strict=True)]
    schedule: Any = pipecut.get_schedule_class(setting.schedule)
    return schedule(made if setting.chunks > 1 else made[0], setting.microbatches, nn.functional.mse_loss)


def _traced_schedule(setting: Setting, model: nn.Module, held: tuple[int, ...], stages: int) -> Any:
    """Make pipecut's schedule of a model that is traced and cut where `our_schedule` is."""
    spec = {str(stage): pipecut.SplitPoint.BEGINNING for stage in range(1, stages)}
    pipe = pipecut.pipeline(model, (torch.ones(setting.load.rows, setting.load.width),), split_spec=spec)
    made = [pipe.build_stage(index, "cpu") for index in held]
    schedule: Any = pipecut.get_schedule_class(setting.schedule)
    return schedule(made if setting.chunks > 1 else made[0], setting.microbatches, nn.functional.mse_loss)


def _planned_schedule(plan: Plan, module: nn.Module, rank: int) -> Any:
    """Make the schedule of a plan with one stage for each rank."""
    stage = pipecut.PipelineStage(module, rank, plan.stages, "cpu")
    return pipecut.PlannedSchedule([stage], plan, nn.functional.mse_loss)


def upstream_schedule(setting: Setting, modules: list[nn.Module], held: tuple[int, ...], stages: int) -> Any:
    """Make upstream's schedule of a setting."""
    device = torch.device("cpu")
    made = [
        pipelining.PipelineStage(module, index, stages, device) for module, index in zip(modules, held, strict=True)
    ]
    schedule = upstream_schedule_class(setting.schedule)
    return schedule(made if setting.chunks > 1 else made[0], setting.microbatches, nn.functional.mse_loss)


def _measured_costs(schedules: Sequence[Any], load: Load, held: tuple[int, ...], stages: int) -> Costs:
    """The mean time of every computation on its stage, over some steps and the schedules that have it."""
    steps = [_computations(schedule, load, held, stages) for schedule in [*schedules] * TRACED_STEPS]
    return _costs_of([[entry for step in steps for entry in step]], stages)[0]


def _computations(schedule: Any, load: Load, held: tuple[int, ...], stages: int) -> Computed:
    """Run a step, and return the kind, the stage and the seconds of each of its computations on this rank."""
    schedule.tracing = True
    _step(schedule, load, held, stages)
    spans: list[Span] = schedule.trace()
    schedule.tracing = False
    # A forward and a backward that overlap are one computation in two stages; each of them is there on its own too.
    return [(each.action.op, each.action.stage, each.end - each.start) for each in spans if each.action.op in COMPUTED]


def _costs_of(own: list[Computed], stages: int) -> list[Costs]:
    """Return, for each of several lists, the mean costs of all ranks' computations in it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return [_mean_costs([entry for part in parts for entry in part], stages) for parts in zip(*gathered, strict=True)]


def _mean_costs(entries: Computed, stages: int) -> Costs:
    times: dict[tuple[Op, int], list[float]] = {}
    for op, stage, seconds in entries:
        times.setdefault((op, stage), []).append(seconds)
    mean = {key: statistics.fmean(values) for key, values in times.items()}
    by_stage = {op: [mean.get((op, stage), 0.0) for stage in range(stages)] for op in Op}
    return Costs(
        forward=by_stage[Op.FORWARD],
        backward_input=by_stage[Op.BACKWARD_INPUT],
        backward_weight=by_stage[Op.BACKWARD_WEIGHT],
        full_backward=by_stage[Op.FULL_BACKWARD] if any(by_stage[Op.FULL_BACKWARD]) else None,
    )
