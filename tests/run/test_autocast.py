"""torch.autocast around a step: as around the uncut model, or refused with what to do."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, Schedule1F1B, StepError, pipeline
from tests.support.training import assert_same_gradients, gradients_of

WITHIN = 3e-2  # of bfloat16

X, Y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def autocast(on: bool) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        yield


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))


def traced_schedule(net: nn.Module, under: bool) -> Schedule1F1B:
    with autocast(under):
        pipe = pipeline(net, (X,), num_stages=2)
    return Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 3, loss_fn)


def test_traced_and_run_under_the_same_autocast() -> None:
    net = model()
    uncut, schedule = copy.deepcopy(net), traced_schedule(net, under=True)
    with autocast(True):
        loss_fn(uncut(X), Y).backward()
        schedule.step(X, target=Y)
    assert_same_gradients(gradients_of(net), gradients_of(uncut), WITHIN)


@pytest.mark.parametrize(
    ("traced_under", "message"),
    [
        (
            False,
            r"is bfloat16\[2, 4\] here, and stage 1 expects float32\[2, 4\]: torch.autocast is on \(bfloat16 on cpu\) "
            r"here, and was off when the model was traced: call pipeline\(\) and the schedule under the same "
            "torch.autocast",
        ),
        (
            True,
            r"is float32\[2, 4\] here, and stage 1 expects bfloat16\[2, 4\]: torch.autocast is off here, and was on "
            r"\(bfloat16 on cpu\) when the model was traced",
        ),
    ],
)
def test_traced_and_run_under_another_autocast(traced_under: bool, message: str) -> None:
    schedule = traced_schedule(model(), traced_under)
    with autocast(not traced_under), pytest.raises(StepError, match=message):
        schedule.step(X, target=Y)


def test_stages_cut_by_hand_follow_the_autocast_of_each_step() -> None:
    net = model()
    uncut = copy.deepcopy(net)
    schedule = Schedule1F1B([PipelineStage(part, nth, 2, "cpu") for nth, part in enumerate(net)], 3, loss_fn)
    for on in (True, False, True, False):
        with autocast(on):
            loss_fn(uncut(X), Y).backward()
            output = schedule.step(X, target=Y)
        assert output.dtype == (torch.bfloat16 if on else torch.float32)
        assert_same_gradients(gradients_of(net), gradients_of(uncut), 4 * WITHIN)


def test_a_dtype_that_changes_between_steps() -> None:
    class Fickle(nn.Linear):
        dtype = torch.float32

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to(self.dtype)

    first = Fickle(4, 4)
    stages = [PipelineStage(first, 0, 2, "cpu"), PipelineStage(nn.Identity(), 1, 2, "cpu")]
    schedule = Schedule1F1B(stages, 3, loss_fn)
    schedule.step(X, target=Y)
    first.dtype = torch.float16
    with pytest.raises(
        StepError,
        match=r"is float16\[2, 4\] here, and stage 1 expects float32\[2, 4\]: check what the module of stage 0 "
        "returns; torch.autocast has to be the same on all ranks, and after a change of a module's dtype the "
        "schedule has to be made again",
    ):
        schedule.step(X, target=Y)


@pytest.mark.filterwarnings("ignore:what lies between")
@pytest.mark.parametrize("traced", [True, False])
def test_the_remedy_for_unfreezing_is_one_that_helps(traced: bool) -> None:
    net = model()
    net[0].requires_grad_(False)
    parts = [PipelineStage(part, nth, 2, "cpu") for nth, part in enumerate(net)]
    schedule = traced_schedule(net, under=False) if traced else Schedule1F1B(parts, 3, loss_fn)
    schedule.step(X, target=Y)
    net[0].requires_grad_(True)
    remedy = "traced; call pipeline\\(\\) again" if traced else "first run; make the schedule again"
    with pytest.raises(StepError, match=f"it needs a gradient now, and did not when .* {remedy} after unfreezing"):
        schedule.step(X, target=Y)
    net.zero_grad()
    uncut = copy.deepcopy(net)
    loss_fn(uncut(X), Y).backward()
    again = traced_schedule(net, under=False) if traced else Schedule1F1B(parts, 3, loss_fn)
    again.step(X, target=Y)
    assert_same_gradients(gradients_of(net), gradients_of(uncut), 1e-5)
