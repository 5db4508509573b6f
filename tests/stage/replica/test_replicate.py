"""The older replicate() on a stage: DistributedDataParallel out of sight, steered all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipecut import StepError
from pipecut.errors import InputError
from pipecut.stage.replica import replica_of
from tests.stage.replica.pipeline_grid import Grid, Part
from tests.stage.replica.test_ddp import SPLIT, Choosy, HalfCopied, average_once
from tests.stage.replica.wrappers import replicated
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("schedule", ["1F1B", SPLIT])
def test_averaged_once_a_step(ranks: Ranks, schedule: str) -> None:
    ranks.run(average_once, schedule, replicated)


def average_later(number: int) -> None:
    grid = Grid(number, SPLIT, replicated)
    modules: list[Any] = list(grid.modules.values())
    for module in modules:
        module.set_requires_gradient_sync(False)
    grid.step(0)
    for gradient in [parameter.grad for module in modules for parameter in module.parameters()]:
        others = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(others, gradient, group=grid.mesh["dp"].get_group())
        assert not torch.equal(*others)
    for module in modules:
        module.set_requires_gradient_sync(True)
    grid.step(1)
    grid.check_gradients()


def test_the_user_may_put_the_average_off(ranks: Ranks) -> None:
    ranks.run(average_later)


def replicate_blocks(module: Any, mesh: Any) -> nn.Module:
    for block in module.blocks:
        replicated(block, mesh)
    return module  # type: ignore[no-any-return]


def average_parts(number: int) -> None:
    grid = Grid(number, "1F1B", replicate_blocks, parts=HalfCopied)
    grid.step()
    grid.check_gradients()


def test_parts_of_a_stage(ranks: Ranks) -> None:
    ranks.run(average_parts)


def name_unused(number: int) -> str:
    with pytest.raises(StepError) as caught:
        Grid(number, "1F1B", replicated, parts=Choosy).step()
    return str(caught.value)


def test_unused_parameters_are_named(ranks: Ranks) -> None:
    for message in ranks.run(name_unused):
        assert "never.norm.weight" in message
        assert "got no gradient in this step: give replicate() find_unused_parameters=True" in message
    ranks.close()


def copy_over_the_pipeline(number: int) -> str:
    with pytest.raises(InputError) as caught:
        Grid(number, "1F1B", lambda module, mesh: replicated(module, _Everybody()))  # type: ignore[arg-type]
    return str(caught.value)


class _Everybody:
    """In the place of a mesh: all ranks."""

    def get_group(self) -> None:
        return None


def test_copies_among_the_ranks_of_the_pipeline(ranks: Ranks) -> None:
    for message in ranks.run(copy_over_the_pipeline):
        assert "is copied or sharded over ranks [0, 1, 2, 3]" in message


def group_by_mesh(number: int) -> list[int]:
    from torch.distributed._composable.replicate import replicate

    mesh = Grid(number, "1F1B", replicated).mesh["dp"]
    (group,) = replica_of(replicate(Part(4), device_mesh=mesh)).groups
    return dist.get_process_group_ranks(group)


def test_the_group_of_a_mesh(ranks: Ranks) -> None:
    assert ranks.run(group_by_mesh) == [[0, 2], [1, 3], [0, 2], [1, 3]]
