"""Evaluation before, between and after training steps, with other batch sizes, leaves gradients alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipeWarning, ScheduleForwardOnly, get_schedule_class, pipeline
from tests.support.models import (
    WIDTH,
    by_hand_model,
    by_hand_problem,
    chain_pipe,
    chain_problem,
    stages_by_hand,
    stages_of_chain,
    tangled_pipe,
    tangled_problem,
    traced_stages,
)
from tests.support.training import (
    TIGHT,
    Problem,
    assert_evaluates_as_uncut,
    assert_same_gradients,
    assert_trains_as_uncut,
    gradients_of,
)


class Tagger(nn.Module):
    """A model that makes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


SCHEDULES = ["GPipe", "Interleaved1F1B", "ZB-H2", "ZBVZeroBubble", "DualPipeV", "V-Min"]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("traced", [True, False])
def test_batches_of_all_sizes_in_any_order(name: str, traced: bool) -> None:
    ranks = 4 if name in ("GPipe", "ZB-H2") else 2
    if traced:
        pipe = tangled_pipe(4)
        stages, make, model = traced_stages(pipe), tangled_problem, pipe.traced.model
    else:
        by_hand = by_hand_model(4)
        stages, make, model = stages_by_hand(by_hand), by_hand_problem, by_hand
    schedule = get_schedule_class(name)(stages, 4, make(model, 4).loss_fn, ranks=ranks)  # type: ignore[arg-type]
    assert_evaluates_as_uncut(schedule, make(model, 5))
    assert_trains_as_uncut(schedule, make(model, 9))
    assert_evaluates_as_uncut(schedule, make(model, 4, seed=1))
    assert_trains_as_uncut(schedule, make(model, 6, seed=2))
    assert_evaluates_as_uncut(schedule, make(model, 13))
    assert_trains_as_uncut(schedule, make(model, 9), times=2)


def test_evaluation_keeps_no_graph() -> None:
    problem = chain_problem(2, samples=4)
    schedule = get_schedule_class("1F1B")(stages_of_chain(problem.model), 2, F.mse_loss)  # type: ignore[arg-type]
    seen: list[bool] = []
    for layer in problem.model.children():
        layer.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    schedule.eval(*problem.args, target=problem.target)
    assert seen == [False] * 4


def test_the_mode_is_that_of_the_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.Linear(8, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    pipe = pipeline(model, (x,), num_stages=2)
    schedule = get_schedule_class("1F1B")(traced_stages(pipe), 2, F.mse_loss)  # type: ignore[arg-type]
    pipe.eval()
    model.eval()
    assert_evaluates_as_uncut(schedule, Problem(model, (x,), x, F.mse_loss))
    pipe.train()
    assert not torch.allclose(schedule.eval(x), model(x))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_forward_only(ranks: int) -> None:
    pipe = tangled_pipe(4)
    problem = tangled_problem(pipe.traced.model, samples=7)
    schedule = ScheduleForwardOnly(traced_stages(pipe), 3, problem.loss_fn, ranks=ranks)
    assert_evaluates_as_uncut(schedule, problem)
    without_loss = ScheduleForwardOnly(traced_stages(pipe), 3, ranks=ranks)
    for run in (without_loss.step, without_loss.eval):
        output = run(*problem.args, **problem.kwargs)
        torch.testing.assert_close(output["hidden"], pipe(*problem.args, **problem.kwargs)["hidden"].detach())
        assert output["hidden"].shape == (7, 3, WIDTH)


@pytest.mark.parametrize("traced", [True, False])
def test_inference_mode_is_for_evaluation(traced: bool) -> None:
    problem = chain_problem(2, samples=6)
    stages = traced_stages(chain_pipe(problem)) if traced else stages_of_chain(problem.model)
    schedule = get_schedule_class("1F1B")(stages, 3, F.mse_loss)  # type: ignore[arg-type]
    with torch.inference_mode():
        with pytest.raises(
            InputError, match=r"and torch.inference_mode\(\) is on here: call it outside, or call eval\(\)"
        ):
            schedule.step(*problem.args, target=problem.target)
        assert_evaluates_as_uncut(schedule, problem)
    assert_trains_as_uncut(schedule, problem)
    with torch.no_grad():  # which a step puts aside
        schedule.step(*problem.args, target=problem.target)
    assert_trains_as_uncut(schedule, problem)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("traced", [True, False])
def test_fewer_samples_than_microbatches(name: str, traced: bool) -> None:
    """The last batch of a data loader had 3 samples for 4 microbatches, and ended the job after its last step."""
    ranks = 4 if name == "1F1B" else 2
    by_hand = by_hand_model(4)
    pipe = tangled_pipe(4)
    stages = traced_stages(pipe) if traced else stages_by_hand(by_hand)
    make, model = (tangled_problem, pipe.traced.model) if traced else (by_hand_problem, by_hand)
    schedule = get_schedule_class(name)(stages, 4, make(model, 4).loss_fn, ranks=ranks)  # type: ignore[arg-type]
    assert_trains_as_uncut(schedule, make(model, 6))
    for samples in (3, 1, 2):
        assert_evaluates_as_uncut(schedule, make(model, samples))
    with pytest.warns(PipeWarning, match="the batch has 3 samples, and the schedule 4 microbatches: the step runs 3"):
        assert_trains_as_uncut(schedule, make(model, 3))
    assert_trains_as_uncut(schedule, make(model, 1), times=2)  # without another warning
    assert_trains_as_uncut(schedule, make(model, 5))


def test_fewer_microbatches_of_a_model_with_its_own_loss() -> None:
    """The first step finds out whether there is a loss with the microbatches that it has."""
    model = Tagger().double()
    batch = {"x": torch.randn(7, WIDTH, dtype=torch.float64), "labels": torch.arange(7) % 5}
    pipe = pipeline(model, (), batch, num_stages=2)
    schedule = get_schedule_class("1F1B")(traced_stages(pipe), 4)  # type: ignore[arg-type]
    few = {name: value[:2] for name, value in batch.items()}
    with pytest.warns(PipeWarning, match="the batch has 2 samples"):
        output = schedule.step(**few)
    expected = model(**few)
    torch.testing.assert_close(output["loss"], expected["loss"].detach())
    actual = gradients_of(model)
    model.zero_grad(set_to_none=True)
    expected["loss"].backward()
    assert_same_gradients(actual, gradients_of(model), TIGHT)
    losses: list[torch.Tensor] = []
    torch.testing.assert_close(schedule.eval(**few, losses=losses)["logits"], expected["logits"].detach())
    assert len(losses) == 2
