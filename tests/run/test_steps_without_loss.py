"""Steps of a schedule without a loss_fn, of a model without a loss: forwards only, on one process and on ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, PipeWarning, PlannedSchedule, Schedule1F1B
from pipecut.errors import PipeError, PlanError
from pipecut.run.runner import loss_probe_of
from pipecut.schedule import Plan, compare, plan_for, simulate
from pipecut.schedule.registry import FAMILIES
from tests.support.ranks import Ranks


def test_every_forward_runs_once() -> None:
    """Also that of the microbatch from which it is found out that there is no loss."""
    first, last = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate((first, last))]
    schedule = Schedule1F1B(stages, 4)
    with pytest.warns(PipeWarning, match="run forwards only"):
        schedule.step(torch.randn(8, 4))
    assert [part.get_buffer("1.num_batches_tracked").item() for part in (first, last)] == [4, 4]
    assert not any(stage.flights for stage in stages)


class Forgetful(nn.Module):
    """Has a loss for every other microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output = self.layer(x)
        return output.mean() if self.calls % 2 else output  # type: ignore[no-any-return]


def test_a_loss_in_the_first_microbatch_only() -> None:
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate((nn.Linear(4, 4), Forgetful()))]
    with pytest.raises(
        PipeError, match="in 1F1 .*a training step needs a loss, and the output of the model is a tensor"
    ):
        Schedule1F1B(stages, 4).step(torch.randn(8, 4))


class Mean(nn.Module):
    """A loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_the_first_step_is_in_another_order_than_the_plan_and_the_second_is_not() -> None:
    """Its first microbatch goes through all stages before the others: what is compared has to be a later step."""
    plan = plan_for("Interleaved1F1B", ranks=2, microbatches=4)
    parts = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Mean()]
    schedule = PlannedSchedule([PipelineStage(part, index, 4, "cpu") for index, part in enumerate(parts)], plan)
    schedule.tracing = True
    schedule.step(torch.randn(8, 4))
    with pytest.raises(PlanError, match=r"Rank 0 executed 2F0 as number 1 where .* has 0F1: .*: trace a later one"):
        compare(simulate(plan), schedule.trace())
    schedule.step(torch.randn(8, 4))
    assert len(compare(simulate(plan), schedule.trace()).ranks) == 2


def step_without_loss(rank: int, name: str) -> tuple[list[int], list[bool], int]:
    """Two steps of a model without a loss, on two ranks, and an evaluation."""
    chunks = FAMILIES[name].chunks
    plan = plan_for(name, ranks=2, chunks=chunks, microbatches=4)
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(plan.stages)))
    own = plan.placement.stages_of[rank]
    schedule = PlannedSchedule([PipelineStage(whole[index], index, plan.stages, "cpu") for index in own], plan)
    x = torch.randn(8, 4)
    found: list[Tensor] = []
    counts = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = schedule.step(*((x,) if 0 in own else ()))
        counts.append(sum(issubclass(each.category, PipeWarning) for each in caught))
        found += [] if output is None else [output]
    tracked = [int(whole[index].get_buffer("1.num_batches_tracked")) for index in own]
    assert all(parameter.grad is None for parameter in whole.parameters())
    assert counts == [1, 1], counts
    evaluated = schedule.eval(*((x,) if 0 in own else ()))
    return tracked, [each.shape == x.shape for each in found], 0 if evaluated is None else len(evaluated)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_steps_without_a_loss_on_ranks(two_ranks: Ranks, name: str) -> None:
    has_last = 0 if FAMILIES[name].chunks == 2 and name != "Interleaved1F1B" else 1
    for rank, (tracked, shapes, evaluated) in enumerate(two_ranks.run(step_without_loss, name)):
        assert tracked == [8] * FAMILIES[name].chunks  # each forward once
        assert shapes == ([True, True] if rank == has_last else [])
        assert evaluated == (8 if rank == has_last else 0)


def loss_on_the_last_rank_only(rank: int) -> list[str]:
    """Gradients of a rank that has no loss_fn, where the last has one; with a target and no loss_fn an error."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    schedule = Schedule1F1B(PipelineStage(whole[rank], rank, 2, "cpu"), 4, F.mse_loss if rank == 1 else None)
    schedule.step(*((x,) if rank == 0 else ()), target=y)
    found = {name: each.grad for name, each in whole[rank].named_parameters()}
    whole.zero_grad()
    F.mse_loss(whole(x), y).backward()
    for name, each in whole[rank].named_parameters():
        torch.testing.assert_close(found[name], each.grad)
    schedule = Schedule1F1B(PipelineStage(whole[rank], rank, 2, "cpu"), 4)
    with pytest.raises(PipeError) as caught:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == 1 else {}))
    return [str(caught.value)]


@pytest.mark.distributed
def test_the_last_rank_has_the_loss(two_ranks: Ranks) -> None:
    for (message,) in two_ranks.run(loss_on_the_last_rank_only):
        assert "There is a target, and no loss_fn to take it" in message
    two_ranks.close()


def test_plans_whose_first_forwards_are_in_overlaps() -> None:
    """Then nothing is known before a backward begins."""
    rows = [["0F1", "1F0", "(0F0;1B0)OVERLAP_F_B", "1F1"]]
    assert loss_probe_of(Plan.from_actions(rows, placement=[0, 0])) is None
    assert loss_probe_of(Plan.from_actions([["0F1", "0F0", "1F1", "1F0"]], placement=[0, 0])) is not None
    for name, family in FAMILIES.items():
        assert loss_probe_of(plan_for(name, ranks=2, chunks=family.chunks, microbatches=4)) is not None
