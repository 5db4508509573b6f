"""Ranks whose stages, cut by hand or traced, share a parameter: each function runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, PlannedSchedule, pipeline
from pipecut.schedule import plan_for
from tests.run.distributed.failure_cases import Tied
from tests.support.training import assert_same_gradients, gradients_of

WORDS, WIDTH, SAMPLES = 9, 8, 10


class Table(nn.Embedding):
    """An embedding of words, or, of vectors, how near they are to each word."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.dtype is torch.long else x @ self.weight.T


def layers_of(stages: int) -> nn.Sequential:
    """The first and the last layer are one parameter."""
    torch.manual_seed(0)
    first, *others = Table(WORDS, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(stages - 2)), Table(WORDS, WIDTH)
    model = nn.Sequential(first, *others).double()
    model[-1].weight = model[0].weight
    return model


def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    ids, target = torch.randint(WORDS, (2, SAMPLES), generator=numbers)
    return ids, target


def own(model: nn.Sequential, mine: Any) -> list[PipelineStage]:
    """Copies of the layers of this rank: as in a program in which a rank makes its own layers only."""
    layers = {index: copy.deepcopy(model[index]) for index in mine}
    return [PipelineStage(layer, index, len(model), "cpu") for index, layer in layers.items()]


def trains_by_hand(rank: int, world: int, name: str) -> dict[str, Tensor]:
    """Three steps of an optimizer beside the uncut model: each gradient, and at the end each weight."""
    plan = plan_for(name, ranks=world, microbatches=world + 1)
    uncut = layers_of(plan.stages)
    stages = own(uncut, plan.placement.stages_of[rank])
    schedule = PlannedSchedule(stages, plan, F.cross_entropy, ties=[{0: "weight", plan.stages - 1: "weight"}])
    ids, target = batch()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (uncut, *(stage.submod for stage in stages))]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(2):  # two steps accumulate
            F.cross_entropy(uncut(ids), target).backward()
            schedule.step(
                *((ids,) if plan.placement.rank_of[0] == rank else ()),
                target=target if plan.placement.rank_of[-1] == rank else None,
            )
        for stage in stages:
            assert_same_gradients(gradients_of(stage.submod), gradients_of(uncut[stage.stage_index]), 1e-10)
        for optimizer in optimizers:
            optimizer.step()
    last = plan.stages - 1
    return {
        f"stage {stage.stage_index}": stage.submod.weight.detach() for stage in stages if stage.stage_index in (0, last)
    }


def _schedule(rank: int, traced: bool) -> tuple[PlannedSchedule, Any, nn.Module]:
    """Two stages, the step of this rank, and its module."""
    plan = plan_for("1F1B", ranks=2, microbatches=2)
    torch.manual_seed(0)
    ids = torch.randint(9, (4, 3))
    model = Tied()
    loss = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())  # noqa: E731
    if traced:
        stages = [pipeline(model, (ids,)).build_stage(rank, "cpu")]
        schedule = PlannedSchedule(stages, plan, loss)
    else:
        stages = [PipelineStage((model.embed, model.head)[rank], rank, 2, "cpu")]
        schedule = PlannedSchedule(stages, plan, loss, ties=[{0: "weight", 1: "weight"}])
    call: dict[str, Any] = {} if rank == 0 else {"target": ids}
    return schedule, lambda: schedule.step(*((ids,) if rank == 0 else ()), **call), stages[0].submod


def freezes_on_one(rank: int, traced: bool, who: int) -> None:
    """One rank freezes what it shares, for itself, after a step."""
    _, step, module = _schedule(rank, traced)
    step()
    if rank == who:
        module.requires_grad_(False)
    step()


def freezes_on_all(rank: int) -> None:
    """Trained, then frozen on both ranks, then trained again, beside the uncut model."""
    uncut, (ids, target) = layers_of(3), batch()
    part = copy.deepcopy(uncut[:1] if rank == 0 else uncut[1:])
    tied = part[-1].weight
    plan = plan_for("1F1B", ranks=2, microbatches=2)
    stage = PipelineStage(part, rank, 2, "cpu")
    schedule = PlannedSchedule([stage], plan, F.cross_entropy, ties=[{0: "0.weight", 1: "2.weight"}])
    for trained in (True, False, True):
        for parameter in (uncut[0].weight, tied):
            parameter.requires_grad_(trained)
        F.cross_entropy(uncut(ids), target).backward()
        schedule.step(*((ids,) if rank == 0 else ()), target=target if rank == 1 else None)
        assert_same_gradients(gradients_of(part), gradients_of(uncut[:1] if rank == 0 else uncut[1:]), 1e-10)


def declares(rank: int, what: str) -> None:
    """Something is wrong with a tie of two ranks."""
    torch.manual_seed(0)
    tables = [Table(WORDS, WIDTH), Table(WORDS, WIDTH)]
    tables[1].load_state_dict(tables[0].state_dict())
    ties = [{0: "weight", 1: "weight"}]
    if what == "values" and rank == 1:
        with torch.no_grad():
            tables[1].weight.add_(1)
    elif what == "shape":
        tables[1] = Table(WORDS + 2, WIDTH)
    elif what == "declared on one" and rank == 1:
        ties = []
    plan = plan_for("1F1B", ranks=2, microbatches=2)
    stage = PipelineStage(tables[rank], rank, 2, "cpu")
    ids, target = batch()
    schedule = PlannedSchedule([stage], plan, F.cross_entropy, ties=ties)
    schedule.step(*((ids,) if rank == 0 else ()), target=target if rank == 1 else None)
