"""Stages and blocks compiled by torch.compile train under every schedule, with the gradients of the uncut model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from pipecut import PipelineStage, PipeWarning, PlannedSchedule
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.run.random_models import by_microbatches, noisy_loss, noisy_model, noisy_problem, noisy_stages
from tests.support.models import (
    ByHand,
    by_hand_model,
    by_hand_problem,
    stages_by_hand,
    tangled_pipe,
    tangled_problem,
    traced_stages,
)
from tests.support.sampling import sampled
from tests.support.training import (
    TIGHT,
    Problem,
    assert_evaluates_as_uncut,
    assert_same_gradients,
    assert_trains_as_uncut,
    cut_step,
    uncut_step,
)

STAGES = 4
SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]
FULL_BACKWARDS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")


class Counting:
    """A backend that counts how often compiled graphs run, forward and backward."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        def counted(part: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                self.runs += 1
                return part(*args)

            return make_boxed_func(run)

        compiled: Callable[..., Any] = aot_autograd(fw_compiler=counted)(graph, example)
        return compiled


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def wrap(stage: PipelineStage, backend: Counting) -> None:
    compiled: Any = torch.compile(stage.submod, backend=backend)
    stage.submod = compiled


def in_place(stage: PipelineStage, backend: Counting) -> None:
    stage.submod.compile(backend=backend)


def its_layer(stage: PipelineStage, backend: Counting) -> None:
    """One block of the unflattened stage."""
    layers: Any = stage.submod.layers
    layers[stage.stage_index] = torch.compile(layers[stage.stage_index], backend=backend)


def schedule_of(name: str, stages: list[PipelineStage], loss_fn: Any, microbatches: int, **options: Any) -> Any:
    chunks = FAMILIES[name].chunks
    plan = plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=microbatches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipeWarning)
        return PlannedSchedule(stages, plan, loss_fn, **options)


@pytest.mark.parametrize(
    ("name", "compile_stage"),
    sampled(
        [("1F1B", wrap), ("Interleaved1F1B", its_layer), ("ZBVZeroBubble", in_place)],
        lambda case: case[0] == "Interleaved1F1B",
    ),
)
def test_traced_stages(name: str, compile_stage: Callable[..., None], backend: Counting) -> None:
    """Ties, skips, masks and microbatches of different sizes stay what they are."""
    pipe = tangled_pipe.__wrapped__(STAGES)  # one of its own, for its modules change
    stages = traced_stages(pipe)
    for stage in stages:
        compile_stage(stage, backend)
    problem = tangled_problem(pipe.traced.model, 5)
    schedule = schedule_of(name, stages, problem.loss_fn, 4)
    assert_trains_as_uncut(schedule, problem, times=2)
    # In two steps, a forward and a backward of each stage and microbatch.
    assert backend.runs >= 2 * 2 * STAGES * 4
    assert_evaluates_as_uncut(schedule, problem)


@pytest.fixture(scope="module")
def compiled_by_hand() -> Iterator[tuple[ByHand, list[PipelineStage], Counting]]:
    """Stages cut by hand that are compiled once for all schedules."""
    torch._dynamo.reset()
    model, counting = by_hand_model(STAGES), Counting()
    stages = stages_by_hand(model)
    for stage in stages:
        in_place(stage, counting)
    yield model, stages, counting
    torch._dynamo.reset()


@pytest.mark.parametrize("name", sampled(SCHEDULES, lambda name: name in ("1F1B", "Interleaved1F1B", "ZB-H1")))
def test_every_schedule(name: str, compiled_by_hand: tuple[ByHand, list[PipelineStage], Counting]) -> None:
    model, stages, counting = compiled_by_hand
    problem = by_hand_problem(by_hand_model(STAGES), 8)
    expected = uncut_step(problem)
    before = counting.runs
    schedule = schedule_of(name, stages, problem.loss_fn, 4)
    found = cut_step(schedule, dataclasses.replace(problem, model=model))
    assert_same_gradients(found.gradients, expected.gradients, TIGHT)
    assert counting.runs == before + 2 * STAGES * 4


class Half(nn.Module):
    """A layer that is compiled before one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("width", [4, 256], ids=["small", "large"])
def test_weight_gradients_of_what_is_not_compiled_are_put_off(width: int, backend: Counting) -> None:
    """In small stages all at once, in large ones operation by operation."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Half(width) for _ in range(STAGES))).double()
    for half in model:
        half.first = torch.compile(half.first, backend=backend)
    x, y = (torch.randn(64, width, dtype=torch.float64) for _ in range(2))
    stages = [PipelineStage(half, index, STAGES, "cpu") for index, half in enumerate(model)]
    problem = Problem(model, (x,), y, nn.functional.mse_loss)
    expected = uncut_step(problem)
    found = cut_step(schedule_of("ZBVZeroBubble", stages, problem.loss_fn, 4), problem)
    assert_same_gradients(found.gradients, expected.gradients, TIGHT)
    assert backend.runs >= 2 * STAGES * 4


@pytest.mark.parametrize(("name", "traced"), [("1F1B", False), ("ZB-H1", True)])
def test_dropout_of_compiled_stages(name: str, traced: bool, backend: Counting) -> None:
    """This backend draws what torch draws, so that even the uncut model does the same."""
    stages = noisy_stages(plan_for(name, ranks=STAGES, microbatches=4), traced)
    for stage in stages:
        wrap(stage, backend)
    problem = noisy_problem(noisy_model(STAGES, traced), 8)
    schedule = schedule_of(name, stages, noisy_loss, 4, random_numbers="as_uncut")
    torch.manual_seed(5)
    cut = cut_step(schedule, problem)
    torch.manual_seed(5)
    assert_same_gradients(cut.gradients, by_microbatches(problem, (2, 2, 2, 2)).gradients, TIGHT)


def test_a_warning_where_compiled_stages_keep_weight_gradients_from_being_put_off() -> None:
    stages = stages_by_hand(by_hand_model(STAGES))
    compiled: Any = torch.compile(stages[1].submod, backend="eager")
    stages[1].submod = compiled
    plan = plan_for("ZB-H1", ranks=STAGES, microbatches=4)
    with pytest.warns(PipeWarning) as caught:
        PlannedSchedule(stages, plan)
    assert str(caught[0].message) == (
        "stage 1 has modules compiled by torch.compile. The backward of each is one piece: its weight gradients are "
        "computed along with those of its inputs, and are not left for the idle time that ZB-H1 fills with them. A "
        "schedule with full backwards, such as 1F1B or Interleaved1F1B, does the same with less memory"
    )
    stages[2].submod.compile(backend="eager")
    with pytest.warns(PipeWarning, match=r"^stages \[1, 2\] have modules compiled"):
        PlannedSchedule(stages, plan)


@pytest.mark.parametrize("name", FULL_BACKWARDS)
def test_no_warning_under_full_backwards(name: str) -> None:
    stages = stages_by_hand(by_hand_model(STAGES))
    stages[1].submod.compile(backend="eager")
    chunks = FAMILIES[name].chunks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PlannedSchedule(stages, plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=4))
