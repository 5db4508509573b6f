"""Measured plans: what stages were seen to take, at the planned size, is what the plan predicts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import TrainingPlan
from pipecut.planning import measure as measuring
from pipecut.planning.costs import DeferralRule
from pipecut.planning.measure import StageBenchmark, StageTimes, example_values
from pipecut.schedule import simulate
from pipecut.split.chain import chain_of
from pipecut.split.cost import Times
from pipecut.stage.backward import StageWeights
from tests.support.sampling import sampled

# Its layers sleep for each sample, of which there are any number while it is traced.
pytestmark = pytest.mark.filterwarnings("ignore:torch.export cannot trace all of Sequential")


class Clock:
    """Goes on when a layer asks for it, and a little whenever it is read: no busy machine disturbs it."""

    seconds = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        if not isinstance(seconds, float):
            raise TypeError("a symbol is no time to sleep")
        cls.seconds += seconds

    @classmethod
    def perf_counter(cls) -> float:
        cls.seconds += 1e-5
        return cls.seconds


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * x.shape[0]
        Clock.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        Clock.sleep(2 * ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """Takes its time for each sample, and twice that in the backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _Waits.apply(self.linear(x), self.seconds)  # type: ignore[no-any-return,no-untyped-call]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "time", Clock)
    monkeypatch.setattr(measuring, "_BENCHMARK_SECONDS", 0.02)


def slow_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(0.001) for _ in range(4)))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("recompute", sampled([False, True], lambda recompute: recompute))
def test_times_are_those_of_the_stages_at_the_planned_size(recompute: bool) -> None:
    """Two layers of 1 ms a sample, for microbatches of 6 where the example has 2."""
    found = pipecut.plan(
        slow_model(), torch.ones(2, 4), ranks=2, batch=12, microbatch=6, schedules=["1F1B"], recompute=recompute,
        cost="measured", time_budget=0.0,
    )  # fmt: skip
    assert found.cuts == ("the cut after '1'",)
    costs = found.report.costs
    forwards, backwards = costs.forward, costs.full_backward
    assert isinstance(forwards, tuple)
    assert isinstance(backwards, tuple)
    backward = 0.030 if recompute else 0.024  # recomputed are the values that are needed: not the end of a stage
    assert forwards == pytest.approx((0.012, 0.012), rel=0.01)
    assert backwards == pytest.approx((backward, backward), rel=0.01)
    # The first stage has no input that needs a gradient: nothing can be done before its weights.
    first, second = costs.backward_input  # type: ignore[misc]
    assert first < 0.001
    assert second == pytest.approx(backward, rel=0.01)


@pytest.mark.usefixtures("clock")
def test_times_of_stages_survive_a_file(tmp_path: Path) -> None:
    net, x = slow_model(), torch.ones(2, 4)
    found = pipecut.plan(
        net, x, ranks=2, batch=4, microbatch=2, schedules=["1F1B"], recompute=False, cost="measured", time_budget=0.0
    )
    found.save(tmp_path / "plan.json")
    again = TrainingPlan.load(tmp_path / "plan.json", net, x)
    assert again.report.costs == found.report.costs
    assert again.step_time == found.step_time == simulate(found.schedule_plan, found.report.costs).makespan


def test_those_that_were_not_run_are_taken_to_be_as_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages of the best cuts take 10 times what was estimated: a plan that nobody ran must not look faster."""

    def ten_times(self: StageBenchmark, stages: Any, in_flight: Any) -> Any:
        slow = StageTimes(Times(1.0, 1.0, 1.0), 2.0)
        return lambda: dict.fromkeys(stages, slow)

    monkeypatch.setattr(StageBenchmark, "prepare", ten_times)
    found = pipecut.plan(
        slow_model(), torch.ones(2, 4), ranks=2, batch=8, microbatch=2, recompute=False, cost="measured",
        time_budget=0.0,
    )  # fmt: skip
    assert found.step_time >= 3 * 4
    assert all(each.step_time is None or each.step_time >= found.step_time for each in found.alternatives)


def test_rows_repeat_where_a_batch_is_larger_than_the_example() -> None:
    net, x = nn.Linear(4, 4), torch.arange(8.0).reshape(2, 4)
    traced = pipecut.pipeline(net, (x,)).traced
    [value] = example_values(traced, (x,), {}, torch.device("cpu"), {"batch": 3}).values()
    assert value.tolist() == [*x.tolist(), x[0].tolist()]


@pytest.mark.parametrize("width", [8, 2048])
def test_stages_hold_their_gradients_where_the_estimate_says_so(width: int) -> None:
    """One rule decides in the plan and in the stage."""
    net, x = nn.Sequential(*(nn.Linear(width, width) for _ in range(3))), torch.ones(64, width)
    pipe = pipecut.pipeline(net, (x,), split_policy=None, num_stages=3)
    rule = DeferralRule(chain_of(pipe.traced))
    held = [rule.holds(stage, stage + 1) for stage in range(3)]
    seen = [
        not StageWeights(stage.parameters()).is_worth_deferring([x.requires_grad_()], on_cpu=True)
        for stage in pipe.stages[1:]
    ]
    assert held == [False, *seen]  # the first has no input that needs a gradient
    assert seen == [width == 8] * 2


def test_a_stage_whose_inputs_need_no_gradient_has_all_of_its_backward_for_the_weights() -> None:
    net, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.ones(4, 8)
    chain = chain_of(pipecut.pipeline(net, (x,)).traced)
    for cuts in itertools.combinations(range(1, 4), 2):
        first, *others = chain.stage_costs(cuts)
        assert first.times.backward_input == 0
        assert all(stage.times.backward_input > 0 for stage in others)
    net[0].requires_grad_(False)
    frozen = chain_of(pipecut.pipeline(net, (x,)).traced).stage_costs((1, 2))
    assert [stage.times.backward_input > 0 for stage in frozen] == [False, False, True]
    trained = chain_of(pipecut.pipeline(net, (x.clone().requires_grad_(),)).traced).stage_costs((1, 2))
    assert [stage.times.backward_input > 0 for stage in trained] == [True, True, True]


def test_an_example_without_samples() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with pytest.raises(
        pipecut.InputError,
        match=r"an input of the example has the shape \(0, 4\): it has nothing that could be repeated to the 2 along "
        r"dim 0 that a measured run takes; pass an example with a sample at least",
    ):
        pipecut.plan(net, torch.ones(0, 4), ranks=2, batch=4, microbatch=2, schedules=["1F1B"], cost="measured")


@pytest.mark.parametrize("cost", ["analytic", "measured"])
def test_nothing_is_planned_in_inference_mode(cost: Any) -> None:
    """Analytic plans were made there, for less memory than training takes: autograd keeps nothing."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with (
        torch.inference_mode(),
        pytest.raises(
            pipecut.InputError,
            match=r"plan\(\) prices forwards and backwards, and torch.inference_mode\(\) allows no backward: call it "
            "outside of it",
        ),
    ):
        pipecut.plan(net, torch.ones(2, 4), ranks=2, batch=4, schedules=["1F1B"], cost=cost)
