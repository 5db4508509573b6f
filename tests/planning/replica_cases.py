"""Work of ranks in the tests of plans for several pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pipecut
from pipecut.stage import UnwrappedNames
from tests.planning.group_cases import BATCH, WIDTH, model

MACHINE = pipecut.Machine.nominal("cpu")


def planned(net: nn.Module | None = None, **options: Any) -> pipecut.TrainingPlan:
    """A plan for four ranks in two pipelines."""
    options = {"ranks": 4, "batch": BATCH, "replicas": 2, "machine": MACHINE, "time_budget": 0.0} | options
    return pipecut.plan(net or model(), torch.ones(2, WIDTH), **options)


def batch() -> tuple[Tensor, Tensor]:
    """The samples and targets of all pipelines."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return x, y


def gradients_as_planned(rank: int, folder: str, options: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """The pipeline of this rank, and how far each gradient of its stages is from that of the uncut model.

    Two steps with zero_grad between them; the plan was saved and loaded.
    """
    path = Path(folder) / f"{rank}.json"
    planned(**options).save(path)
    net = model()
    found = pipecut.TrainingPlan.load(path, net, torch.ones(2, WIDTH))
    x, y = batch()
    uncut = model()
    nn.functional.mse_loss(uncut(x), y).backward()
    expected = dict(uncut.named_parameters())
    schedule = found.build(rank, loss_fn=nn.functional.mse_loss)
    part = found.data_rank(rank)
    mine = slice(part * BATCH // 2, (part + 1) * BATCH // 2)
    first, last = (any(getattr(stage, end) for stage in schedule.stages) for end in ("is_first", "is_last"))
    for _ in range(2):
        for stage in schedule.stages:
            stage.submod.zero_grad()
        schedule.step(*((x[mine],) if first else ()), target=y[mine] if last else None)
    off = {}
    for stage in schedule.stages:
        names = UnwrappedNames(stage.submod)
        for name, parameter in stage.submod.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            off[names.of(name)] = float((grad - expected[names.of(name)].grad).abs().max())  # type: ignore[operator]
    return part, off


def refuses_a_group(rank: int) -> str:
    """The message for a group of the user's own."""
    try:
        planned(schedules=["1F1B"]).build(rank, group=torch.distributed.group.WORLD)
    except pipecut.PipeError as error:
        return str(error)
    return ""
