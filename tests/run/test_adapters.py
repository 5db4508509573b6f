"""Low-rank adapters beside frozen layers: exact gradients, and nothing is differentiated below the lowest of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PlannedSchedule
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.run.gradient_traffic import watched
from tests.support.models import WIDTH, chain_pipe, stages_of_chain, traced_stages
from tests.support.sampling import sampled
from tests.support.training import Problem, assert_trains_as_uncut

STAGES, MICROBATCHES = 4, 5
SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]


class Adapted(nn.Module):
    """A frozen layer and a product of two thin matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + self.up(self.down(x)))


def adapted(lowest: int) -> Problem:
    """Adapters from a stage on; what is below is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(STAGES))).double()
    model[:lowest].requires_grad_(False)
    x, y = (torch.randn(7, WIDTH, dtype=torch.float64) for _ in range(2))
    return Problem(model, (x,), y, F.mse_loss)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("lowest", sampled([0, 2, 3], lambda lowest: lowest == 2))
def test_adapters_under_every_schedule(lowest: int, traced: bool) -> None:
    problem = adapted(lowest)
    stages = traced_stages(chain_pipe(problem)) if traced else stages_of_chain(problem.model)
    for name in SCHEDULES:
        chunks = FAMILIES[name].chunks
        plan = plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=MICROBATCHES)
        schedule = PlannedSchedule(stages, plan, problem.loss_fn)
        with watched() as traffic:
            assert_trains_as_uncut(schedule, problem)
        assert traffic.gradients == {(stage, stage - 1) for stage in range(lowest + 1, STAGES)}, name
        assert len(traffic.backwards) == MICROBATCHES * (STAGES - lowest), name
