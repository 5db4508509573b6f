"""Peak memory of a training step beside upstream's: bytes that torch has allocated at a time in the processes of ranks.

Both sides run in the same processes, on stages that are alike. torch's profiler notes every allocation and every
release of its allocator, from before the first step: what a side keeps from one step to the next counts too, and so do
gradients. Memory that two ranks of ours share counts half on each, all that there is, also of settings before. Time
plays no part in it.
"""

from __future__ import annotations

import copy
import gc
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pipecut
from pipecut.schedule import plan_for

from .measure import Goal, show_goals, show_table
from .stepping import SCHEDULES, Load, Setting, layers_of, our_schedule, upstream_schedule

FLAT = ("1F1B", "ZBVZeroBubble", "DualPipeV")
RANKS, FEW, MANY = (2, 4), 8, 32
LOAD = Load("memory", width=128, layers=4, rows=256, limit=1.0)
STEPS = 2  # the first one makes gradients, and learns shapes


@dataclass(frozen=True)
class Peaks:
    """Bytes of one rank: of a step of ours, of upstream's, and of one of ours that returns no output."""

    allocated: int
    upstream: int
    without_output: int
    mapped: int  # shared memory, each page of which is one other rank's too; blocks of earlier settings are used again

    @property
    def ours(self) -> int:
        return self.allocated + self.mapped // 2


def run(rounds: int) -> Iterator[Goal]:
    """Measure all settings, print the tables and the goals."""
    for ranks in RANKS:
        settings = [
            Setting(name, chunks, microbatches, LOAD)
            for name, chunks in SCHEDULES.items()
            for microbatches in (FEW, MANY)
        ]
        measured = dict(zip(settings, zip(*pipecut.launch(_peaks_of, ranks, settings), strict=True), strict=True))
        rows, goals = [], []
        for setting, peaks in measured.items():
            most = max(peaks, key=lambda each: each.ours)
            ours, upstream = most.ours, max(each.upstream for each in peaks)
            what = f"{setting.schedule}, {ranks} ranks, {setting.microbatches} microbatches"
            megabytes = [f"{each / 2**20:.2f}" for each in (ours, most.mapped / 2, upstream)]
            rows.append([what, *megabytes, f"{ours / upstream:.3f}"])
            goals.append(Goal(f"{what}: peak beside upstream", ours / upstream, LOAD.limit))
        columns = ["setting", "pipecut, MB", "of that half of the shared", "upstream, MB", "ratio"]
        show_table(f"peak of a step, {ranks} ranks, on the rank with the most", columns, rows)
        yield from show_goals([*goals, *(_flat(name, ranks, measured) for name in FLAT)])


def _flat(name: str, ranks: int, measured: dict[Setting, tuple[Peaks, ...]]) -> Goal:
    few, many = (
        max(each.without_output for each in peaks)
        for count in (FEW, MANY)
        for setting, peaks in measured.items()
        if (setting.schedule, setting.microbatches) == (name, count)
    )
    return Goal(f"{name}, {ranks} ranks: peak with {MANY} microbatches, of that with {FEW}", many / few, 1.01)


def _peaks_of(settings: list[Setting]) -> list[Peaks]:
    """Measure all settings on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return [_peaks(setting) for setting in settings]


def _peaks(setting: Setting) -> Peaks:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * setting.chunks
    plan = plan_for(setting.schedule, ranks=ranks, chunks=setting.chunks, microbatches=setting.microbatches)
    held = plan.placement.stages_of[rank]
    modules = [layers_of(setting.load) for _ in held]
    x, y = torch.randn(2, setting.load.rows * setting.microbatches, setting.load.width)
    call: dict[str, Any] = {"target": y} if stages - 1 in held else {}
    inputs = (x,) if 0 in held else ()
    peaks = []
    for option in ({}, {"return_outputs": False}) if setting.schedule in FLAT else ({},):
        ours = our_schedule(setting, copy.deepcopy(modules), held, stages)
        peaks.append(_peak(partial(ours.step, *inputs, **call, **option)))
    del ours
    mapped = _mapped()
    upstream = upstream_schedule(setting, modules, held, stages)
    return Peaks(peaks[0], _peak(partial(upstream.step, *inputs, **call)), peaks[-1], mapped)


def _peak(step: Callable[[], object]) -> int:
    """Return the most bytes that were allocated at a time in a few steps, beyond those before the first."""
    gc.collect()  # what is released now must not count against what is allocated then
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(STEPS):
            step()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    level = peak = maps_until = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "aten::from_file":  # maps shared memory, which is counted apart
            maps_until = event.end_ns()
        elif event.name() == "[memory]" and event.start_ns() > maps_until:
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def _mapped() -> int:
    """Return the bytes of shared memory that this process has in use."""
    found = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0
