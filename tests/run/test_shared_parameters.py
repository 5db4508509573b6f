"""Parameters that many stages share stay the same bits on all of them, step by step, and as in the uncut model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PlannedSchedule
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from pipecut.stage.stage import PipelineStage, build_stage
from tests.run.shared_models import CUTS, SharedBlock, SharedEmbedding, batch_of, shared_pipe
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

STAGES, MICROBATCHES, STEPS = 4, 4, 6
SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]


def plan_of(name: str) -> Any:
    chunks = FAMILIES[name].chunks
    return plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=MICROBATCHES)


def train(stages: list[PipelineStage], schedule: PipelineSchedule, uncut: nn.Module, has_batch: bool = True) -> None:
    """Steps of an optimizer for each stage, beside the uncut model; after each one, all parameters are the same."""
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), lr=0.05) for stage in stages]
    uncut_optimizer = torch.optim.AdamW(uncut.parameters(), lr=0.05)
    for step in range(STEPS):
        batch = batch_of(step)
        uncut_optimizer.zero_grad()
        uncut(**batch)["loss"].backward()
        uncut_optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        schedule.step(**(batch if has_batch else {}))
        for optimizer in optimizers:
            optimizer.step()
        expected = dict(uncut.named_parameters(remove_duplicate=False))
        for stage in stages:
            for name, parameter in stage.submod.named_parameters(remove_duplicate=False):
                torch.testing.assert_close(parameter, expected[name], rtol=1e-8, atol=1e-8, msg=name)


def holders(stages: list[PipelineStage], names: tuple[str, ...]) -> list[Tensor]:
    """The parameter, as each stage that has it under one of its names has it."""
    found = []
    for stage in stages:
        own = dict(stage.submod.named_parameters(remove_duplicate=False))
        found += [own[name].detach() for name in names if name in own][:1]
    return found


@pytest.mark.parametrize("kind", CUTS)
def test_in_process_under_every_schedule(kind: type[nn.Module]) -> None:
    pipe = shared_pipe(kind)
    for name in SCHEDULES:
        # Copied apart, as on ranks: nothing but the sums of gradients keeps the copies the same.
        modules = [copy.deepcopy(pipe.get_stage_module(index)) for index in range(STAGES)]
        stages = [build_stage(module, index, pipe.info(), "cpu") for index, module in enumerate(modules)]
        train(stages, PlannedSchedule(stages, plan_of(name)), copy.deepcopy(pipe.traced.model))
        assert pipe.tied_parameters
        for tie in pipe.tied_parameters:
            first, *others = holders(stages, tie.names)
            assert len(others) + 1 == len(tie.stages) >= 2
            assert all(torch.equal(first, other) for other in others), (name, tie.names)


def train_on_rank(rank: int, kind: type[nn.Module], name: str) -> dict[str, list[Tensor]]:
    plan = plan_of(name)
    pipe = shared_pipe(kind)
    uncut = copy.deepcopy(pipe.traced.model)
    stages = [pipe.build_stage(index, "cpu") for index in plan.placement.stages_of[rank]]
    train(stages, PlannedSchedule(stages, plan), uncut, has_batch=rank == plan.placement.rank_of[0])
    return {tie.names[0]: holders(stages, tie.names) for tie in pipe.tied_parameters}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "name"), sampled([(SharedEmbedding, "1F1B"), (SharedBlock, "ZB-H1")], lambda case: case[1] == "ZB-H1")
)
def test_on_four_ranks(four_ranks: Ranks, kind: type[nn.Module], name: str) -> None:
    found = four_ranks.run(train_on_rank, kind, name)
    for key in found[0]:
        first, *others = [parameter for held in found for parameter in held[key]]
        assert others
        assert all(torch.equal(first, other) for other in others), key
