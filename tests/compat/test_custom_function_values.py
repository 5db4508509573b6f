"""What a custom function passes to a stage or schedule in a step is what is used, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut.compat import PipelineStage, schedules
from pipecut.errors import StepError
from tests.compat.test_subclassing import assert_as_uncut, batch, gradients_of, layers
from tests.compat.user_schedules import rows

Change = Callable[[Any], Any]


def same(value: Any) -> Any:
    return value


def doubled(value: Any) -> Any:
    return tuple(map(doubled, value)) if isinstance(value, tuple | list) else value * 2


class Changes:
    """A function for forwards and one for backwards, as written for upstream, that change one of what they pass."""

    def __init__(self, **changes: Change) -> None:
        self.changes = changes

    def __call__(self, name: str, value: Any) -> Any:
        return self.changes.get(name, same)(value)

    def forward(self, action: Any, ctx: Any) -> None:
        running, number = ctx.schedule_ref, action.microbatch_index
        by_index = {stage.stage_index: stage for stage in running._stages}
        stage = by_index[action.stage_index]
        kwargs = self("kwargs", ctx.kwarg_mbs[number])
        output = stage.forward_one_chunk(number, self("args", ctx.arg_mbs[number]), kwargs)
        targets = self("targets", ctx.target_mbs)
        running._maybe_compute_loss(stage, self("output", output) if stage.is_last else output, targets, number)
        if not stage.is_last:
            by_index[stage.stage_index + 1].set_local_fwd_input(self("input", output), number)

    def backward(self, action: Any, ctx: Any) -> None:
        running, number = ctx.schedule_ref, action.microbatch_index
        by_index = {stage.stage_index: stage for stage in running._stages}
        stage = by_index[action.stage_index]
        loss = running._maybe_get_loss(stage, number)
        stage.backward_one_chunk(number, loss=self("loss", loss) if stage.is_last else loss)
        if not stage.is_first:
            gradients = self("gradients", stage.get_local_bwd_output(number))
            by_index[stage.stage_index - 1].set_local_bwd_input(gradients, number)


def run(training: Any = True, **changes: Change) -> tuple[list[PipelineStage], list[Tensor]]:
    stages = [PipelineStage(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    schedule = schedules._PipelineScheduleRuntime(stages, 2, loss_fn=nn.functional.mse_loss)
    schedule._prepare_schedule_with_comms(rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    functions = Changes(**changes)
    schedule.register_custom_function(schedules.FORWARD, functions.forward)
    schedule.register_custom_function(schedules.FULL_BACKWARD, functions.backward)
    x, y = batch()
    losses: list[Tensor] = []
    (schedule.step if training else schedule.eval)(x, target=y, losses=losses)
    return stages, losses


def test_what_the_executor_holds_may_be_passed() -> None:
    stages, losses = run()
    assert_as_uncut(gradients_of(stages), 2)
    _, evaluated = run(training=False)
    torch.testing.assert_close(evaluated, losses)


def views(values: Any) -> Any:
    return [value.view(value.shape) for value in values]


@pytest.mark.parametrize(
    "changes",
    [
        {"args": views},
        {"kwargs": lambda _: None},
        {"loss": lambda _: None},
        {"targets": lambda targets: targets and list(targets)},
        {"input": lambda output: (output,)},
        {"gradients": lambda _: ()},
    ],
)
def test_the_same_in_another_form_may_be_passed(changes: dict[str, Change]) -> None:
    stages, _ = run(**changes)
    assert_as_uncut(gradients_of(stages), 2)


REFUSED: dict[str, tuple[Change, str]] = {
    "args": (
        doubled,
        r"forward_one_chunk\(\) of stage 0, microbatch 0, got other args than the microbatch has, which the executor "
        r"passes to the module: pass context.arg_mbs\[0\], and change inputs before step\(\)",
    ),
    "kwargs": (
        lambda _: {"scale": 2},
        r"forward_one_chunk\(\) of stage 0, microbatch 0, got other kwargs than .*: pass context.kwarg_mbs\[0\]",
    ),
    "output": (
        doubled,
        r"_maybe_compute_loss\(\) of stage 1, microbatch 0, got another output than forward_one_chunk\(\) returned, "
        "and its loss is made already: change the output in the module's forward, or in loss_fn",
    ),
    "targets": (
        lambda targets: None if targets is None else doubled(targets),
        r"_maybe_compute_loss\(\) of stage 1, microbatch 0, got another target than the step has, and its loss is made "
        "already: pass context.target_mbs, and change targets",
    ),
    "input": (
        doubled,
        r"set_local_fwd_input\(\) of stage 1, microbatch 0, got other values than forward_one_chunk\(\) of stage 0 "
        "returned here, and in a step those are used: pass what it returned, and change it in a module's forward",
    ),
    "loss": (
        doubled,
        r"backward_one_chunk\(\) of stage 1, microbatch 0, got another loss than the one its backward begins with: "
        r"pass what schedule._maybe_get_loss\(\) returned, and change the loss in loss_fn",
    ),
    "gradients": (
        lambda _: (torch.ones(4, 6),),
        r"set_local_bwd_input\(\) of stage 0, microbatch 0, got gradients, and in a step those that the stage after "
        r"made are used: pass what its get_local_bwd_output\(\) returned, and put a hook",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_something_else_is_refused(name: str) -> None:
    change, told = REFUSED[name]
    with pytest.raises(StepError, match=told) as caught:
        run(**{name: change})
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize("look", [doubled, lambda gradients: gradients[0]])
def test_gradients_that_are_on_their_way_cannot_be_looked_into(look: Change) -> None:
    with pytest.raises(StepError, match=r"the gradients of get_local_bwd_output\(\) are already in transit in a step"):
        run(gradients=look)
