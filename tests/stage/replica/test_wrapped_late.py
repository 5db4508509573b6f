"""Copies that are made after a stage was: seen when the schedule is made, and refused after that."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipecut import Schedule1F1B, StepError
from tests.stage.replica.pipeline_grid import MICROBATCHES, Grid, Wrap
from tests.stage.replica.wrappers import alone, copied, replicated, sharded
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


def wrap(grid: Grid, how: Wrap) -> list[Any]:
    """Put the stages of a grid of single modules under a wrapper."""
    stages = grid.schedule.stages
    for stage in stages:
        stage.submod = grid.modules[stage.stage_index] = how(stage.submod, grid.mesh["dp"])
    return list(stages)


def wrap_before_the_schedule(number: int, how: Wrap) -> None:
    grid = Grid(number, "1F1B", alone)
    [stage] = wrap(grid, how)
    grid.schedule = Schedule1F1B(stage, MICROBATCHES, nn.functional.mse_loss)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()


@pytest.mark.parametrize("how", [copied, replicated, sharded])
def test_a_module_that_is_wrapped_after_its_stage_was_made(ranks: Ranks, how: Wrap) -> None:
    """Gradients were those of one copy, without a word."""
    ranks.run(wrap_before_the_schedule, how)


def wrap_after_the_schedule(number: int, how: Wrap) -> str:
    grid = Grid(number, "1F1B", alone)
    wrap(grid, how)
    with pytest.raises(StepError) as caught:
        grid.pipeline_step()
    return str(caught.value)


@pytest.mark.parametrize("how", [copied, replicated, sharded])
def test_a_module_that_is_wrapped_after_its_schedule_was_made(ranks: Ranks, how: Wrap) -> None:
    for text in ranks.run(wrap_after_the_schedule, how):
        assert "after its schedule was made: wrap it first, and then make the schedule" in text
