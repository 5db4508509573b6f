"""Steps without a loss run forwards only, also of stages that have copies; and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecut import PipeWarning, get_schedule_class
from tests.stage.replica.pipeline_grid import MICROBATCHES, Grid, Wrap
from tests.stage.replica.wrappers import copied, replicated, sharded
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed


def step_without_loss(number: int, schedule: str, wrap: Wrap) -> None:
    """Two such steps of a schedule of its own, before and after steps that train the same stages."""
    grid = Grid(number, schedule, wrap)
    untrained = get_schedule_class(schedule)(grid.schedule.stages, MICROBATCHES)  # type: ignore[arg-type]
    for seed in range(2):
        x, _ = grid.half(seed)
        kept = [None if each.grad is None else each.grad.clone() for each in parameters(grid)]
        with pytest.warns(PipeWarning, match="run forwards only, and no gradients were computed"):
            output = untrained.step(*((x,) if grid.is_first else ()))
        if grid.is_last:
            with torch.no_grad():
                torch.testing.assert_close(output, grid.whole(x))
        for parameter, before in zip(parameters(grid), kept, strict=True):
            assert (parameter.grad is None) == (before is None)
            assert before is None or parameter.grad.equal(before)  # type: ignore[union-attr]
        grid.step(seed)
        grid.check_gradients()
        grid.check_eval(seed)


def parameters(grid: Grid) -> list[nn.Parameter]:
    return [parameter for module in grid.modules.values() for parameter in module.parameters()]


@pytest.mark.parametrize("wrap", sampled([copied, replicated, sharded], lambda wrap: wrap is not replicated))
@pytest.mark.parametrize("schedule", sampled(["1F1B", "ZBVZeroBubble"], lambda name: name != "1F1B"))
def test_steps_without_a_loss(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    ranks.run(step_without_loss, schedule, wrap)
