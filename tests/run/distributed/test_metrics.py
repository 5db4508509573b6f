"""Figures of a step on ranks: every rank knows those of all, without a message of its own."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pipecut import PipelineStage, Schedule1F1B
from pipecut.run.metrics import StepMetrics
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed

MICROBATCHES = 4


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def steps_of_a_slow_second_stage(rank: int) -> tuple[StepMetrics, StepMetrics, float]:
    stage = PipelineStage(Slow(0.02 * rank), rank, 2, "cpu")
    schedule = Schedule1F1B(stage, MICROBATCHES, nn.functional.mse_loss)
    x, y = torch.ones(2, 8, 4)
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step(target=y)
    trained = schedule.last_step()
    loss = schedule.mean_loss()
    schedule.eval(x[:4]) if rank == 0 else schedule.eval()
    return trained, schedule.last_step(), loss


def test_every_rank_knows_how_all_ranks_spent_the_step(two_ranks: Ranks) -> None:
    (trained, evaluated, loss), other = two_ranks.run(steps_of_a_slow_second_stage)
    assert (trained, evaluated, loss) == other
    assert (trained.samples, trained.tokens, trained.loss) == (8, None, loss)
    assert (evaluated.samples, evaluated.loss) == (4, None)
    first, second = trained.ranks
    assert second.computing >= 0.02 * MICROBATCHES > first.sending
    assert first.waiting > second.waiting
    assert first.bubble_rate > second.bubble_rate
    for rank in trained.ranks:
        assert rank.computing + rank.waiting + rank.sending == pytest.approx(trained.seconds, rel=1e-9)
        assert rank.peak_memory > 2**20


def step_of_two_pipelines(rank: int) -> tuple[StepMetrics, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    index, copy = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = DistributedDataParallel(nn.Linear(4, 4), process_group=mesh["dp"].get_group())
    stage = PipelineStage(module, index, 2, "cpu", group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
    schedule.count_tokens = lambda x: 10 * len(x)
    x, y = torch.ones(2, 4 + 2 * copy, 4)
    schedule.step(x) if index == 0 else schedule.step(target=y)
    made = schedule.last_step(), schedule.mean_loss()
    dist.barrier()
    return made


def test_samples_and_tokens_are_those_of_all_copies_of_the_pipeline(four_ranks: Ranks) -> None:
    for last, loss in four_ranks.run(step_of_two_pipelines):
        assert (last.samples, last.tokens, len(last.ranks), last.loss) == (10, 100, 2, loss)
