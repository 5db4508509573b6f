"""The sums of tied gradients in what plan() predicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import TrainingPlan
from pipecut.schedule import Action, Op, lower
from pipecut.schedule.simulate import simulate
from pipecut.split.cost.machine import Machine

MACHINE = Machine(link_latency=1e-3, link_bandwidth=1e6)


class Tied(nn.Module):
    """A table that is also the last layer, and a weight that is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.body[5].weight = self.body[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def made(schedule: str) -> TrainingPlan:
    torch.manual_seed(0)
    tokens = torch.randint(50, (8, 4))
    return pipecut.plan(
        Tied(), tokens, ranks=2, batch=8, microbatch=2, schedules=[schedule], recompute=False, machine=MACHINE,
        time_budget=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tied_plan() -> TrainingPlan:
    return made("1F1B")


def test_the_step_includes_the_sums_of_ties(tied_plan: TrainingPlan) -> None:
    """A plan of a tied model had no ties: its time was that of a step that leaves out what the run does at its end."""
    plan = tied_plan.schedule_plan
    assert plan.dataflow.ties == (frozenset({0, 1}), frozenset({0, 1}))
    for rank, row in enumerate(plan.actions):
        assert row[-2:] == (Action(rank, Op.REDUCE_TIES, 0), Action(rank, Op.REDUCE_TIES, 1))
    without = simulate(lower.drop_reduce_ties(plan), tied_plan.report.costs).makespan
    # Each way a word of what a rank has, and the gradient: the table's, and that of the weight.
    each_way = sum(2 * 1e-3 + elements * 4 / 1e6 for elements in (50 * 16, 16 * 16))
    assert tied_plan.step_time >= without + 2 * each_way - 1e-9
    assert tied_plan.step_time == pytest.approx(without + 2 * each_way, rel=0.02)


def test_stages_of_one_rank_share_a_parameter_for_nothing() -> None:
    plan = made("ZBVZeroBubble")
    assert plan.schedule_plan.dataflow.ties
    last = max(stage for tie in plan.schedule_plan.dataflow.ties for stage in tie)
    assert plan.schedule_plan.placement.rank_of[last] == plan.schedule_plan.placement.rank_of[0]
    assert Action(0, Op.REDUCE_TIES, 0) not in plan.schedule_plan.actions[0]


def test_the_ties_of_a_plan_are_numbered_as_those_of_its_pipe(tied_plan: TrainingPlan) -> None:
    ties = tied_plan.pipe().tied_parameters
    assert [tie.names[0] for tie in ties] == ["embedding.weight", "body.0.weight"]
    assert tied_plan.report.costs.tie_bytes == (50 * 16 * 4, 16 * 16 * 4)


def test_a_run_of_the_plan_has_its_sums_and_compare_shows_them(tied_plan: TrainingPlan) -> None:
    schedule = tied_plan.build(loss_fn=lambda out, target: nn.functional.cross_entropy(out.mT, target))
    schedule.tracing = True
    tokens = torch.randint(50, (8, 4))
    schedule.step(tokens, target=tokens)
    compared = pipecut.compare(tied_plan, schedule.trace())
    sums = compared.kinds[-1]
    assert sums.what == "reduce ties"
    assert sums.executed >= 0  # ranks in one process take turns: the last to come was not waited for


def test_a_plan_with_ties_and_alternatives_comes_back_from_its_file(tmp_path: Path) -> None:
    """A plan that was loaded had lost its table of alternatives, and said nothing of it."""
    tokens = torch.randint(50, (8, 4))
    model = Tied()
    plan = pipecut.plan(
        model, tokens, ranks=2, batch=8, microbatch=[2, 4], schedules=["1F1B", "GPipe"], machine=MACHINE,
        time_budget=0.0,
    )  # fmt: skip
    assert len(plan.alternatives) > 3
    plan.save(tmp_path / "plan.json")
    again = TrainingPlan.load(tmp_path / "plan.json", model, tokens)
    assert again.alternatives == plan.alternatives
    assert again.schedule_plan == plan.schedule_plan
    assert str(again) == str(plan)


def test_a_printed_plan_tells_its_gap_its_balance_and_the_memory_of_ranks(tied_plan: TrainingPlan) -> None:
    """The bound was proven, and nothing that a user sees showed it."""
    text = str(tied_plan)
    assert "no schedule of these stages takes less than" in text
    assert "ms, sums of shared gradients aside: at most" in text
    assert "ms are sums of gradients that ranks share" in text
    assert "balance of the cut: the busiest rank takes" in text
    assert "by analytic times" in text
    assert "rank 0 needs at most" in text
    assert "rank 1 needs at most" in text


class Picky(nn.Module):
    """Decides in a line that rich would read as one with a style."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        dim = 0
        if x.shape[dim] < 2:
            return x
        return self.layers(x)  # type: ignore[no-any-return]


def test_brackets_in_a_reason_are_printed_as_they_are() -> None:
    """The line of the model that a reason quotes was printed as `if x.shape < 2`."""
    found = pipecut.plan(
        Picky(), torch.ones(4, 4), ranks=2, batch=8, schedules=["1F1B"], machine=MACHINE, time_budget=0.0,
        recompute=False,
    )  # fmt: skip
    assert any("x.shape[dim] < 2" in each.reason for each in found.alternatives)
    assert "[dim]" in str(found)
