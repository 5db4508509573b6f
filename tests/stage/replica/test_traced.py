"""Stages of a traced model, with a parameter that the first and the last of them share, and copies of each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipecut import SplitPoint, build_stage, get_schedule_class, pipeline
from tests.stage.replica.pipeline_grid import (
    MICROBATCHES,
    PIPELINE,
    REPLICAS,
    SAMPLES,
    Block,
    Wrap,
    check_gradient,
    plan_of,
)
from tests.stage.replica.wrappers import copied
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


class Language(nn.Module):
    """Looks words up in a table, and compares with the same table in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def sharded_everywhere(module: Any, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def train(number: int, schedule: str, wrap: Wrap) -> None:
    mesh = init_device_mesh("cpu", (REPLICAS, PIPELINE), mesh_dim_names=("dp", "pp"))
    replica, rank = divmod(number, PIPELINE)
    plan = plan_of(schedule)
    model = Language().double()
    whole = copy.deepcopy(model)
    batch = torch.randint(16, (REPLICAS * SAMPLES, 5))
    tokens = batch.chunk(REPLICAS)[replica]
    cuts = {f"blocks.{4 * stage // plan.stages}": SplitPoint.BEGINNING for stage in range(1, plan.stages)}
    pipe = pipeline(model, (tokens,), split_spec=cuts)
    modules = {stage: wrap(pipe.get_stage_module(stage), mesh["dp"]) for stage in plan.placement.stages_of[rank]}
    group = mesh["pp"].get_group()
    stages = [build_stage(module, stage, pipe.info(), "cpu", group=group) for stage, module in modules.items()]
    runner: Any = get_schedule_class(schedule)(stages, MICROBATCHES, loss)  # type: ignore[arg-type]
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    for step in range(2):
        loss(whole(batch), batch).backward()
        inputs = (tokens,) if 0 in modules else ()
        target = {"target": tokens} if plan.stages - 1 in modules else {}
        runner.step(*inputs, **target)
        for stage, module in modules.items():
            for name, parameter in module.named_parameters():
                plain = name.removeprefix("module.")
                check_gradient(f"{stage}.{plain} in step {step}", parameter, wanted[plain].grad)
        runner.eval(*inputs, **target)


def loss(output: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(
    ("schedule", "wrap"),
    [
        pytest.param("1F1B", copied, marks=pytest.mark.slow),
        pytest.param("1F1B", sharded_everywhere, marks=pytest.mark.slow),
        ("ZBVZeroBubble", sharded_everywhere),
    ],
    ids=["1F1B, copied", "1F1B, sharded", "both ends of the tie on one rank, sharded"],
)
def test_traced_stages_with_a_tie(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    ranks.run(train, schedule, wrap)
