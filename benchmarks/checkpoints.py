"""Times saves of a training job beside what torch.distributed.checkpoint takes for the same tensors alone.

And steps beside an asynchronous save, beside steps without one. Two local ranks over gloo, on one disk.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipecut
from pipecut.text import format_bytes

from .measure import Goal, median_ratio, show_goals, show_table

RANKS, MICROBATCHES, ROWS, WIDTH, LAYERS, STEPS = (
    2,
    8,
    64,
    1024,
    12,
    2,
)  # about 50 MB of parameters, and 150 MB with AdamW


def run(rounds: int) -> list[Goal]:
    """Print the ratios, each the median over the rounds."""
    folder = tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "."), prefix="checkpoints-")
    try:
        (found, *_) = pipecut.launch(_rank, RANKS, folder, rounds)
    finally:
        shutil.rmtree(folder)
    show_table(
        f"checkpoints of {RANKS} ranks, {format_bytes(found['bytes'])} in all; load of the machine "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        ["what", "seconds (median)"],
        [
            ["save by torch.distributed.checkpoint alone", f"{found['dcp']:.3f}"],
            ["save_checkpoint of the same tensors", f"{found['save']:.3f}"],
            ["step", f"{found['step']:.3f}"],
            ["step beside an asynchronous save", f"{found['beside']:.3f}"],
            ["call of an asynchronous save, which copies", f"{found['call']:.3f}"],
        ],
    )
    return show_goals(
        [
            Goal("save beside torch.distributed.checkpoint", found["save ratio"], 1.2),
            Goal("step beside an asynchronous save", found["step ratio"], 1.15),
        ]
    )


def _rank(folder: str, rounds: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    pipe = pipecut.pipeline(model, (x[:ROWS],), num_stages=RANKS)
    schedule = pipecut.Schedule1F1B(pipe.build_stage(rank, "cpu"), MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(schedule.parameters())

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), target=x if rank else None, return_outputs=False)
        optimizer.step()

    for _ in range(3):
        step()
    return _measured(Path(folder), rounds, schedule, optimizer, step)


def _measured(
    folder: Path, rounds: int, schedule: Any, optimizer: torch.optim.Optimizer, step: Callable[[], None]
) -> dict[str, float]:
    """Measure in turn, round by round: the load of the machine is then that of all."""
    tensors = _tensors(schedule, optimizer)
    times: dict[str, list[float]] = {"dcp": [], "save": [], "step": [], "beside": [], "call": []}
    plain, ours = folder / "plain", folder / "ours"

    def save(asynchronous: bool = False) -> Any:
        return pipecut.save_checkpoint(ours, schedule, optimizer, step=0, asynchronous=asynchronous)

    sides: dict[str, Callable[[], Any]] = {"dcp": lambda: _plain_save(tensors, plain), "save": save}
    for number in range(rounds + 1):  # the first round warms up
        for name in sorted(sides, reverse=bool(number % 2)):
            times[name].append(_seconds(sides[name]))
            shutil.rmtree(plain if name == "dcp" else ours, ignore_errors=True)  # neither has older ones to remove
            dist.barrier()
        times["step"].append(_seconds(step, STEPS) / STEPS)
        start = time.perf_counter()
        beside = save(asynchronous=True)
        times["call"].append(time.perf_counter() - start)
        # As many steps on every rank, whoever is done first: a step needs all.
        times["beside"].append(_seconds(step, STEPS) / STEPS)
        beside.wait()
    size = sum(tensor.nbytes for tensor in tensors.values())
    total = torch.tensor(float(size))
    dist.all_reduce(total)
    found = {name: statistics.median(values[1:]) for name, values in times.items()}
    found["save ratio"] = median_ratio(times["save"][1:], times["dcp"][1:])
    found["step ratio"] = median_ratio(times["beside"][1:], times["step"][1:])
    return found | {"bytes": float(total)}


def _tensors(schedule: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of the job has on this rank."""
    names = {id(parameter): name for name, parameter in schedule.named_parameters()}
    found = {name: parameter.detach() for name, parameter in schedule.named_parameters()}
    for parameter, values in optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{key}": value for key, value in values.items()}
    return found


def _plain_save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint import save

    save(dict(tensors), checkpoint_id=folder)


def _seconds(function: Callable[[], Any], times: int = 1) -> float:
    """The seconds of some calls, from when all ranks are ready to when all are done."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        function()
    dist.barrier()
    return time.perf_counter() - start
