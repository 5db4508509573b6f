"""Gradients are those of the mean over the batch, whatever an order has for REDUCE_GRAD; nothing scales them twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from pipecut.compat import PipelineStage, schedules
from pipecut.errors import PipeWarning, StepError
from tests.compat.test_subclassing import assert_as_uncut, batch, gradients_of, layers
from tests.compat.user_schedules import rows

WARNING = (
    "a custom function for REDUCE_GRAD finds gradients that are those of the mean over the batch already, .*: do not "
    "divide them again in it, or make the schedule with scale_grads=False"
)
SUMS = {"scale_grads": False, "loss_fn": lambda output, y: nn.functional.mse_loss(output, y) / 2}  # of 2 microbatches
MEANS = {"loss_fn": nn.functional.mse_loss}


def run(order: dict[int, Any], reduce: Callable[[Any, Any], None] | None = None, **options: Any) -> dict[str, Tensor]:
    stages = [PipelineStage(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    schedule = schedules._PipelineScheduleRuntime(stages, 2, **(MEANS | options))
    schedule._prepare_schedule_with_comms(order, format="compute_comms")
    if reduce is not None:
        schedule.register_custom_function(schedules.REDUCE_GRAD, reduce)
    x, y = batch()
    schedule.step(x, target=y)
    return gradients_of(stages)


def order(*ends: str) -> dict[int, Any]:
    return rows(
        f"0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 {ends[0]}",
        f"1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 {ends[1]}",
    )


REDUCING = order("0REDUCE_GRAD", "1REDUCE_GRAD")


def stage_of(action: Any, ctx: Any) -> Any:
    return {stage.stage_index: stage for stage in ctx.schedule_ref._stages}[action.stage_index]


def test_an_order_without_reductions_is_scaled_too() -> None:
    """Upstream divides in REDUCE_GRAD, so that there an order without it leaves sums."""
    assert_as_uncut(run(order("", "")), 2)


def test_a_function_in_their_place_is_warned_of_and_nothing_is_scaled_twice() -> None:
    """It was silent: a function that divided, as it must with upstream, made gradients too small."""
    called: list[int] = []
    with pytest.warns(PipeWarning, match=WARNING) as told:
        found = run(REDUCING, lambda action, ctx: called.append(action.stage_index))
    assert_as_uncut(found, 2)
    assert sorted(called) == [0, 1]
    assert told[0].filename == __file__
    for name in ("perform_reduce_grad", "scale_grads"):
        with pytest.warns(PipeWarning, match="REDUCE_GRAD"):
            found = run(REDUCING, lambda action, ctx, name=name: getattr(stage_of(action, ctx), name)(2))
        assert_as_uncut(found, 2)


@pytest.mark.parametrize("name", ["perform_reduce_grad", "scale_grads"])
@pytest.mark.parametrize("factor", [1, 4])
def test_another_factor_is_refused(name: str, factor: int) -> None:
    told = (
        rf"{name}\({factor}\) in a step whose gradients are scaled already, as if divided by 2: pass 2, with which "
        "nothing is scaled twice, or make the schedule with scale_grads=False, where it is 1; scale in loss_fn"
    )
    with pytest.warns(PipeWarning, match="REDUCE_GRAD"), pytest.raises(StepError, match=told):
        run(REDUCING, lambda action, ctx: getattr(stage_of(action, ctx), name)(factor))


@pytest.mark.parametrize("name", ["perform_reduce_grad", "scale_grads"])
def test_without_scale_grads_the_factor_is_one(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(REDUCING, lambda action, ctx: getattr(stage_of(action, ctx), name)(1), **SUMS)
    assert_as_uncut(found, 2)
    told = rf"{name}\(2\) in a step whose gradients are not scaled, for the schedule has scale_grads=False: pass 1, or"
    with pytest.raises(StepError, match=told):
        run(REDUCING, lambda action, ctx: getattr(stage_of(action, ctx), name)(2), **SUMS)


def test_a_built_in_order_calls_the_function_after_the_last_backward_of_a_stage() -> None:
    """It was never called, though pipeline_order_with_comms of the schedule shows the action."""
    stages = [PipelineStage(layer, index, 4, "cpu") for index, layer in enumerate(layers(4))]
    schedule = schedules.ScheduleInterleaved1F1B(stages, 4, ranks=2, **MEANS)
    called: list[tuple[str, int]] = []
    with pytest.warns(PipeWarning, match="REDUCE_GRAD"):
        schedule.register_custom_function(
            schedules.REDUCE_GRAD,
            lambda action, ctx: called.append((str(action), len(stages[action.stage_index].flights))),
        )
    x, y = batch()
    schedule.step(x, target=y)
    assert sorted(called) == [(f"{index}REDUCE_GRAD", 0) for index in range(4)]
    assert_as_uncut(gradients_of(stages), 4)
