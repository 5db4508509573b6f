"""Losses of every kind: means and sums, their list, their mean, arguments of their own, and steps that add up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipeError, PlannedSchedule, StepError, get_schedule_class
from pipecut.schedule import plan_for
from tests.support.models import (
    WIDTH,
    Chain,
    chain_problem,
    stages_of_chain,
    tangled_pipe,
    tangled_problem,
    traced_stages,
)
from tests.support.training import (
    Problem,
    assert_same_gradients,
    assert_trains_as_uncut,
    gradients_of,
    uncut_step,
)

EVERY_BACKWARD = ["GPipe", "1F1B", "ZB-H1"]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


@pytest.mark.parametrize("name", EVERY_BACKWARD)
def test_a_sum_without_scaling(name: str) -> None:
    problem = chain_problem(3, samples=8, loss_fn=squares)
    plan = plan_for(name, ranks=3, microbatches=3)
    schedule = PlannedSchedule(stages_of_chain(problem.model), plan, squares, scale_grads=False)
    assert_trains_as_uncut(schedule, problem, times=3)


def test_scaling_may_be_switched_between_steps() -> None:
    """It was read once, by the first step."""
    problem = chain_problem(3, samples=8, loss_fn=squares)
    schedule = PlannedSchedule(
        stages_of_chain(problem.model), plan_for("1F1B", ranks=3, microbatches=4), squares, scale_grads=False
    )
    assert_trains_as_uncut(schedule, problem, times=1)
    schedule.scale_grads = True
    model = problem.model
    model.zero_grad(set_to_none=True)
    schedule.step(*problem.args, target=problem.target)
    found = gradients_of(model)
    model.zero_grad(set_to_none=True)
    for x, y in zip(problem.args[0].chunk(4), problem.target.chunk(4), strict=True):
        (squares(model(x), y) / 4).backward()
    for name, expected in gradients_of(model).items():
        torch.testing.assert_close(found[name], expected, msg=lambda text, name=name: f"{name}: {text}")


def test_microbatches_of_different_sizes_weigh_as_many_samples_as_they_have() -> None:
    problem = chain_problem(2, samples=8)
    plan = plan_for("1F1B", ranks=2, microbatches=3)
    schedule = PlannedSchedule(stages_of_chain(problem.model), plan, F.mse_loss)
    losses: list[Tensor] = []
    output = schedule.step(*problem.args, target=problem.target, losses=losses)
    sizes = [3, 3, 2]
    expected = [F.mse_loss(*pair) for pair in zip(output.split(sizes), problem.target.split(sizes), strict=True)]
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    weighted = sum(loss.item() * size for loss, size in zip(losses, sizes, strict=True)) / 8
    assert schedule.mean_loss() == pytest.approx(weighted, rel=1e-12)
    assert schedule.mean_loss() == pytest.approx(uncut_step(problem).loss, rel=1e-12)


def test_losses_are_those_of_the_last_step_in_the_order_of_microbatches() -> None:
    problem = chain_problem(4, samples=8)
    losses = [torch.zeros(())]
    reference: list[Tensor] = []
    for name in ("GPipe", "ZBVZeroBubble", "DualPipeV"):
        schedule = get_schedule_class(name)(
            stages_of_chain(problem.model),
            6,
            F.mse_loss,
            ranks=4 if name == "GPipe" else 2,  # type: ignore[arg-type]
        )
        for _ in range(2):
            schedule.step(*problem.args, target=problem.target, losses=losses)
            assert len(losses) == 6
            assert not any(loss.requires_grad for loss in losses)
        reference = reference or list(losses)
        assert losses == reference
        schedule.eval(*problem.args, target=problem.target, losses=losses)
        assert losses == reference


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_arguments_of_the_loss(name: str) -> None:
    problem = chain_problem(2, samples=5)

    def loss_fn(output: Tensor, target: Tensor, *, power: int, scale: Tensor) -> Tensor:
        return ((output - target).abs() ** power).mean() * scale

    extra = {"power": 3, "scale": torch.tensor(2.0, dtype=torch.float64)}
    expected = uncut_step(Problem(problem.model, problem.args, problem.target, lambda *pair: loss_fn(*pair, **extra)))
    schedule = get_schedule_class(name)(stages_of_chain(problem.model), 3, loss_fn)  # type: ignore[arg-type]
    schedule.step(*problem.args, target=problem.target, loss_kwargs=extra)
    assert_same_gradients(gradients_of(problem.model), expected.gradients, 1e-10)
    assert schedule.mean_loss() == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("width", [WIDTH, 512])
@pytest.mark.parametrize("name", EVERY_BACKWARD)
def test_a_loss_with_parameters_of_its_own(name: str, width: int) -> None:
    torch.manual_seed(0)
    model, projection = Chain(3, width).double(), nn.Linear(width, width).double()
    x, y = (torch.randn(5, width, dtype=torch.float64) for _ in range(2))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(projection(output), target)

    problem = Problem(model, (x,), y, loss_fn)
    loss_fn(model(x), y).backward()
    expected = gradients_of(projection)
    projection.zero_grad(set_to_none=True)
    schedule = get_schedule_class(name)(stages_of_chain(model), 3, loss_fn)  # type: ignore[arg-type]
    schedule.step(x, target=y)
    assert_same_gradients(gradients_of(projection), expected, 1e-10)
    projection.requires_grad_(False)
    assert_trains_as_uncut(schedule, problem)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
def test_steps_add_up_to_what_was_there_before(name: str) -> None:
    pipe = tangled_pipe(4)  # with a tie
    problem = tangled_problem(pipe.traced.model, samples=7)
    schedule = get_schedule_class(name)(traced_stages(pipe), 4, problem.loss_fn)  # type: ignore[arg-type]
    assert_trains_as_uncut(schedule, problem, times=4)
    first = uncut_step(problem).gradients
    pipe.traced.model.zero_grad(set_to_none=True)
    for parameter in pipe.traced.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    schedule.step(*problem.args, target=problem.target, **problem.kwargs)
    with_ones = {key: None if gradient is None else gradient + 1 for key, gradient in first.items()}
    assert_same_gradients(gradients_of(pipe.traced.model), with_ones, 1e-10)
    pipe.traced.model.zero_grad(set_to_none=True)


def test_outputs_are_kept_only_if_asked_for() -> None:
    problem = chain_problem(2, samples=4)
    schedule = get_schedule_class("1F1B")(stages_of_chain(problem.model), 2, F.mse_loss)  # type: ignore[arg-type]
    assert schedule.step(*problem.args, target=problem.target, return_outputs=False) is None
    assert schedule.eval(*problem.args, return_outputs=False) is None
    assert schedule.eval(*problem.args).shape == (4, WIDTH)


def test_there_is_no_mean_loss_without_a_loss() -> None:
    problem = chain_problem(2, samples=4)
    schedule = get_schedule_class("1F1B")(stages_of_chain(problem.model), 2, F.mse_loss)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="loss"):
        schedule.mean_loss()
    schedule.step(*problem.args, target=problem.target)
    schedule.mean_loss()
    schedule.eval(*problem.args)
    with pytest.raises(InputError, match="loss"):
        schedule.mean_loss()


def test_a_loss_that_is_not_a_number_is_refused_unless_somebody_else_looks_after_it() -> None:
    problem = chain_problem(2, samples=4)
    target = problem.target.clone()
    target[3, 0] = float("nan")
    stages = stages_of_chain(problem.model)
    schedule = get_schedule_class("1F1B")(stages, 2, F.mse_loss)  # type: ignore[arg-type]
    with pytest.raises(PipeError, match=r"the loss is NaN for microbatches \[1\].*check_loss=False"):
        schedule.step(*problem.args, target=target)
    careless = get_schedule_class("1F1B")(stages, 2, F.mse_loss, check_loss=False)  # type: ignore[arg-type]
    careless.step(*problem.args, target=target)
    assert careless.mean_loss() != careless.mean_loss()


def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    """Those of the microbatches before a NaN, or an interruption, stayed, and were added to by the next step."""
    problem = chain_problem(2, samples=4)
    target = problem.target * float("nan")
    schedule = get_schedule_class("1F1B")(stages_of_chain(problem.model), 2, F.mse_loss)  # type: ignore[arg-type]
    with pytest.raises(PipeError, match="the loss is NaN") as caught:
        schedule.step(*problem.args, target=target)
    assert "zero_grad" not in str(caught.value)
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    schedule.step(*problem.args, target=problem.target)
    with pytest.raises(StepError, match=r"the loss is NaN.* Gradients of earlier steps had been kept.*zero_grad"):
        schedule.step(*problem.args, target=target)


class FailingBackward(torch.autograd.Function):
    """Raises in its second backward."""

    calls = 0

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        FailingBackward.calls += 1
        if FailingBackward.calls == 2:
            raise ValueError("no gradient today")
        return gradients[0]


def test_an_input_part_that_fails_leaves_gradients_as_they_were() -> None:
    """The input part of a small stage does all of its backward: that of the microbatch before has left gradients."""
    problem = chain_problem(2, samples=4)
    stages = stages_of_chain(problem.model)
    FailingBackward.calls = 0
    stages[1].submod.register_forward_hook(lambda *call: FailingBackward.apply(call[2]))
    schedule = PlannedSchedule(stages, plan_for("ZB-H1", ranks=2, microbatches=2), F.mse_loss)
    with pytest.raises(StepError, match="no gradient today") as caught:
        schedule.step(*problem.args, target=problem.target)
    assert "zero_grad" not in str(caught.value)
    assert all(parameter.grad is None for parameter in problem.model.parameters())


@pytest.mark.parametrize("is_view", [False, True])
def test_a_loss_does_not_keep_memory_as_large_as_the_output(is_view: bool) -> None:
    """torch reduces into memory of that size, which was held for every microbatch in flight; views stay as they are."""
    problem = chain_problem(2, samples=4)
    made: list[Tensor] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        made.append(loss[None][0] if is_view else loss)
        assert made[-1].untyped_storage().nbytes() > made[-1].nbytes
        return made[-1]

    assert_trains_as_uncut(
        PlannedSchedule(stages_of_chain(problem.model), plan_for("GPipe", ranks=2, microbatches=2), loss_fn), problem
    )
    assert len(made) >= 2
    kept = [loss.untyped_storage().nbytes() > loss.nbytes for loss in made[:2]]
    assert kept == [is_view, is_view]


def test_an_interruption_stays_one_and_leaves_gradients_as_they_were() -> None:
    problem = chain_problem(2, samples=4)
    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return F.mse_loss(output, target)

    schedule = get_schedule_class("1F1B")(stages_of_chain(problem.model), 2, loss_fn)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        schedule.step(*problem.args, target=problem.target)
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    schedule.step(*problem.args, target=problem.target)


def test_a_step_inside_a_step_is_refused() -> None:
    problem = chain_problem(2, samples=4)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        schedule.eval(*problem.args)
        return F.mse_loss(output, target)

    schedule = get_schedule_class("1F1B")(stages_of_chain(problem.model), 2, loss_fn)  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"eval\(\) was called while a step or an evaluation over the same ranks was"):
        schedule.step(*problem.args, target=problem.target)
