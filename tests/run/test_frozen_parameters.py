"""Parameters that need no gradient get none, and what lies below them is not differentiated; all others are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipecut import PipeError, PlannedSchedule, SplitPoint, pipeline
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.models import (
    Tangled,
    chain_pipe,
    chain_problem,
    stages_of_chain,
    tangled_problem,
    traced_stages,
)
from tests.support.training import Problem, assert_trains_as_uncut, gradients_of

STAGES = 4
FROZEN = {
    "first": (0, 1),
    "middle": (1, 2),
    "all but the last": (0, 1, 2),
    "last": (3,),
    "all but the first": (1, 2, 3),
}
SCHEDULES = ["GPipe", "1F1B", "ZB-H1", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def frozen_chain(which: str, needs_gradient: bool = False) -> Problem:
    problem = chain_problem(STAGES, samples=7, needs_gradient=needs_gradient)
    for index in FROZEN[which]:
        problem.model.get_submodule(str(index)).requires_grad_(False)
    return problem


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_stages(which: str, traced: bool) -> None:
    problem = frozen_chain(which)
    stages = traced_stages(chain_pipe(problem)) if traced else stages_of_chain(problem.model)
    for name in SCHEDULES:
        chunks = FAMILIES[name].chunks
        plan = plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=5)
        assert_trains_as_uncut(PlannedSchedule(stages, plan, F.mse_loss), problem, times=2)


@pytest.mark.parametrize("traced", [True, False])
def test_an_input_gets_its_gradient_through_frozen_stages(traced: bool) -> None:
    problem = chain_problem(STAGES, samples=7, needs_gradient=True)
    problem.model.requires_grad_(False)
    stages = traced_stages(chain_pipe(problem)) if traced else stages_of_chain(problem.model)
    for name in ("1F1B", "ZB-H1"):
        plan = plan_for(name, ranks=STAGES, microbatches=3)
        actual = assert_trains_as_uncut(PlannedSchedule(stages, plan, F.mse_loss), problem, times=2)
        assert actual.input_gradients[0] is not None


def test_a_stage_that_is_frozen_in_part() -> None:
    torch.manual_seed(0)
    model = Tangled(4).double()
    model.layers[0].bias.requires_grad_(False)
    model.layers[2].weight.requires_grad_(False)
    problem = tangled_problem(model, samples=7)
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in (1, 2, 3)}
    pipe = pipeline(model, problem.args, dict(problem.kwargs), split_spec=spec)
    for name in ("1F1B", "ZB-H1"):
        plan = plan_for(name, ranks=4, microbatches=3)
        assert_trains_as_uncut(PlannedSchedule(traced_stages(pipe), plan, problem.loss_fn), problem, times=2)


def test_a_tied_parameter_that_is_frozen() -> None:
    torch.manual_seed(0)
    model = Tangled(2).double()
    model.embed.weight.requires_grad_(False)
    problem = tangled_problem(model, samples=5)
    pipe = pipeline(model, problem.args, dict(problem.kwargs), split_spec={"layers.1": SplitPoint.BEGINNING})
    plan = plan_for("ZB-H1", ranks=2, microbatches=3)
    assert_trains_as_uncut(PlannedSchedule(traced_stages(pipe), plan, problem.loss_fn), problem, times=2)


@pytest.mark.parametrize("traced", [True, False])
def test_freezing_between_steps(traced: bool) -> None:
    problem = chain_problem(STAGES, samples=7)
    stages = traced_stages(chain_pipe(problem)) if traced else stages_of_chain(problem.model)
    schedules = [
        PlannedSchedule(stages, plan_for(name, ranks=STAGES, microbatches=3), F.mse_loss) for name in ("1F1B", "ZB-H1")
    ]
    for schedule in schedules:
        assert_trains_as_uncut(schedule, problem)
    problem.model.get_submodule("0").requires_grad_(False)
    problem.model.get_submodule("2").requires_grad_(False)
    for schedule in schedules:
        assert_trains_as_uncut(schedule, problem)


@pytest.mark.parametrize("traced", [True, False])
def test_unfreezing_what_nobody_sends_gradients_to_is_refused(traced: bool) -> None:
    problem = frozen_chain("first")
    stages = traced_stages(chain_pipe(problem)) if traced else stages_of_chain(problem.model)
    schedule = PlannedSchedule(stages, plan_for("1F1B", ranks=STAGES, microbatches=3), F.mse_loss)
    assert_trains_as_uncut(schedule, problem)
    problem.model.requires_grad_(True)
    with pytest.raises(PipeError, match=r"goes from stage 0 to stage 1.*needs a gradient now, and did not"):
        schedule.step(*problem.args, target=problem.target)


def test_a_loss_that_needs_no_gradient_is_refused() -> None:
    problem = chain_problem(2, samples=4)

    def detached_loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.detach(), target)

    schedule = PlannedSchedule(stages_of_chain(problem.model), plan_for("1F1B", ranks=2, microbatches=2), detached_loss)
    with pytest.raises(PipeError, match="loss.*gradient"):
        schedule.step(*problem.args, target=problem.target)


def test_a_step_inside_no_grad_still_has_gradients() -> None:
    problem = chain_problem(2, samples=4)
    schedule = PlannedSchedule(stages_of_chain(problem.model), plan_for("1F1B", ranks=2, microbatches=2), F.mse_loss)
    assert_trains_as_uncut(schedule, problem)
    expected = gradients_of(problem.model)
    problem.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        schedule.step(*problem.args, target=problem.target)
    for name, gradient in gradients_of(problem.model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)
