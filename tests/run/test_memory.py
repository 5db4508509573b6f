"""Nothing of a step is left alive, and its memory does not grow with the number of microbatches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, Schedule1F1B, StepError, get_schedule_class, pipeline
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule.registry import FAMILIES
from tests.support.live_memory import live_tensors, peak_bytes, without_collector
from tests.support.models import (
    Chain,
    by_hand_model,
    by_hand_problem,
    stages_by_hand,
    stages_of_chain,
    tangled_pipe,
    tangled_problem,
    traced_stages,
)
from tests.support.sampling import sampled
from tests.support.training import Problem

SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]
ALL_FORWARDS_FIRST = ("GPipe", "LoopedBFS")


def a_schedule(name: str, traced: bool) -> tuple[PipelineSchedule, Problem]:
    ranks = 4 // FAMILIES[name].chunks
    if traced:
        pipe = tangled_pipe(4)
        problem, stages = tangled_problem(pipe.traced.model, 9), traced_stages(pipe)
    else:
        model = by_hand_model(4)
        problem, stages = by_hand_problem(model, 9), stages_by_hand(model)
    return get_schedule_class(name)(stages, 5, problem.loss_fn, ranks=ranks), problem  # type: ignore[arg-type]


@pytest.mark.parametrize("traced", sampled([True, False], lambda traced: traced))
@pytest.mark.parametrize("name", sampled(SCHEDULES, lambda name: name in ("1F1B", "ZB-H1", "DualPipeV")))
def test_no_tensor_is_left_alive_and_none_sits_in_a_cycle(name: str, traced: bool) -> None:
    schedule, problem = a_schedule(name, traced)

    def run() -> None:
        losses: list[Tensor] = []
        schedule.step(*problem.args, target=problem.target, losses=losses, **problem.kwargs)
        schedule.eval(*problem.args, target=problem.target, losses=losses, **problem.kwargs)

    run()
    with without_collector():
        run()
        gc.collect()  # what tests before this one have left to be found
        before = len(live_tensors())
        for _ in range(8):
            run()
        assert len(live_tensors()) == before
        assert gc.collect() == 0
    assert all(not stage.flights for stage in schedule.stages)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_the_batch_and_the_outputs_are_let_go_of(name: str) -> None:
    schedule, problem = a_schedule(name, traced=True)
    with without_collector():
        inputs = [tensor.clone() for tensor in (*problem.args, *problem.kwargs.values(), problem.target)]
        ids, mask, target = inputs
        output = schedule.step(ids, target=target, mask=mask)
        seen = [weakref.ref(tensor) for tensor in (*inputs, *output.values())]
        del ids, mask, target, inputs, output
        assert [reference() for reference in seen] == [None] * 5


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    schedule, problem = a_schedule("1F1B", traced=False)
    breaks = [False]

    def hook(module: nn.Module, args: object) -> None:
        if breaks[0]:
            raise ValueError("on purpose")

    schedule.stages[2].submod.register_forward_pre_hook(hook)

    def fail() -> None:
        breaks[0] = True
        with pytest.raises(StepError):
            schedule.step(*problem.args, target=problem.target)
        breaks[0] = False

    counts = []
    with without_collector():
        for _ in range(3):
            schedule.step(*problem.args, target=problem.target)
            fail()
            gc.collect()  # an exception refers to the frames that it passed, and they to it
            counts.append(len(live_tensors()))
    assert counts == [counts[0]] * 3
    assert all(not stage.flights for stage in schedule.stages)


@pytest.mark.parametrize(
    "name",
    sampled(
        (name for name in SCHEDULES if name not in ALL_FORWARDS_FIRST),
        lambda name: name in ("1F1B", "ZBVZeroBubble"),
    ),
)
def test_memory_does_not_grow_with_the_number_of_microbatches(name: str) -> None:
    width, samples = 64, 64
    model = Chain(4, width)
    activation = 4 * samples * width
    peaks = []
    for microbatches in (16, 64):
        x = torch.randn(microbatches * samples, width)
        schedule = get_schedule_class(name)(
            stages_of_chain(model),
            microbatches,
            F.mse_loss,
            ranks=4 // FAMILIES[name].chunks,  # type: ignore[arg-type]
        )
        schedule.step(x, target=x)
        model.zero_grad(set_to_none=True)
        run = partial(schedule.step, x, target=x, return_outputs=False)
        # The least of three: on a busy machine the profiler sees some frees late.
        peaks.append(min(peak_bytes(run) for _ in range(3)))
    # 48 losses of 4 bytes each more, and not one activation.
    assert peaks[1] - peaks[0] < activation, f"{peaks} bytes, an activation has {activation}"


def test_memory_does_not_grow_with_the_number_of_microbatches_in_eval() -> None:
    width, samples = 64, 16
    model = Chain(4, width)
    peaks = []
    for microbatches in (8, 64):
        x = torch.randn(microbatches * samples, width)
        schedule = get_schedule_class("1F1B")(stages_of_chain(model), microbatches, F.mse_loss)  # type: ignore[arg-type]
        schedule.eval(x, target=x)
        peaks.append(peak_bytes(partial(schedule.eval, x, target=x, return_outputs=False)))
    assert peaks[1] - peaks[0] < 4 * samples * width, peaks


class Counted(torch.autograd.Function):
    """Counts how many graphs are alive."""

    alive = 0

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.token = Token()  # type: ignore[attr-defined]
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Token:
    """Lives as long as the graph that it is in."""

    def __init__(self) -> None:
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1


def test_each_stage_of_1f1b_holds_as_many_graphs_as_there_are_stages_to_come() -> None:
    most: dict[int, int] = {}

    class Layer(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage, self.linear = stage, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = Counted.apply(self.linear(x))
            most[self.stage] = max(most.get(self.stage, 0), Counted.alive)
            return x

    for measured in range(3):
        most.clear()
        parts = [Layer(stage) if stage == measured else nn.Linear(4, 4) for stage in range(3)]
        stages = [PipelineStage(part, index, 3, "cpu") for index, part in enumerate(parts)]
        x = torch.randn(24, 4)
        get_schedule_class("1F1B")(stages, 12, F.mse_loss).step(x, target=x)  # type: ignore[arg-type]
        assert most == {measured: 3 - measured}
        assert Counted.alive == 0


@pytest.fixture(autouse=True)
def quiet_profiler(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The profiler writes to stderr."""
    yield
    capfd.readouterr()


@pytest.mark.parametrize("traced", [True, False])
def test_nothing_of_a_step_is_alive_after_it(traced: bool) -> None:
    """Activations, outputs and gradients between stages die with the step, once its output is dropped."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x, y = torch.randn(2, 6, 8)
    if traced:
        pipe = pipeline(model, (x[:2],), num_stages=2)
        stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    else:
        stages = [PipelineStage(model[2 * index : 2 * index + 2], index, 2, "cpu") for index in range(2)]
    seen: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend(map(weakref.ref, (*args, output)))
        output.register_hook(lambda gradient: seen.append(weakref.ref(gradient)))

    for stage in stages:
        stage.submod.register_forward_hook(note)
    schedule = Schedule1F1B(stages, 3, F.mse_loss)
    for _ in range(2):
        with without_collector():
            output = schedule.step(x, target=y)
            assert output is not None
            del output
            alive = [reference() for reference in seen]
            assert len(seen) >= 3 * 2 * 3
            assert [tuple(tensor.shape) for tensor in alive if tensor is not None] == []
        seen.clear()
