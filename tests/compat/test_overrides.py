"""Methods that the executor would never call are refused in users' classes; those that it calls are honoured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecut import InputError
from pipecut.compat import PipelineStage, schedules
from pipecut.compat.stage import _PipelineStageBase
from pipecut.compat.unsupported import ORDER_NOT_CALLED, SCHEDULE_NOT_CALLED, STAGE_NOT_CALLED
from tests.compat.test_subclassing import Mock, Own, assert_as_uncut, batch, gradients_of, layers


def anything(self: Any, *args: Any, **kwargs: Any) -> Any:
    return None


def overriding(base: type, name: str) -> Any:
    return type("Mine", (base,), {name: anything, "__module__": "mine"})


def told(name: str, instead: str) -> str:
    return f"Mine defines {name}(), and steps are run by one executor here, which never calls it: {instead}"


@pytest.mark.parametrize(("name", "instead"), STAGE_NOT_CALLED.items())
def test_a_stages_method_that_nothing_calls_is_refused(name: str, instead: str) -> None:
    stage = overriding(PipelineStage, name)(nn.Linear(2, 2), 0, 1, "cpu")
    with pytest.raises(InputError) as caught:
        schedules.ScheduleGPipe(stage, 2)
    assert str(caught.value) == told(name, instead)


@pytest.mark.parametrize(("name", "instead"), SCHEDULE_NOT_CALLED.items())
@pytest.mark.parametrize("base", [schedules.ScheduleGPipe, schedules._PipelineScheduleRuntime])
def test_a_schedules_method_that_nothing_calls_is_refused(base: type, name: str, instead: str) -> None:
    with pytest.raises(InputError) as caught:
        overriding(base, name)([PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")], 2)
    assert str(caught.value) == told(name, instead)


@pytest.mark.parametrize(("name", "instead"), ORDER_NOT_CALLED.items())
def test_what_makes_the_order_of_a_named_schedule_is_refused(name: str, instead: str) -> None:
    stages = [PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")]
    with pytest.raises(InputError) as caught:
        overriding(schedules.ScheduleInterleaved1F1B, name)(stages, 2)
    assert str(caught.value) == told(name, instead)
    overriding(schedules.PipelineScheduleMulti, name)(stages, 2)  # it sets its order, and calls its methods, itself


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        ("forward_one_chunk", "put what it does into the forward of the stage's module"),
        ("backward_one_chunk", "put what it does into hooks of the module or its tensors"),
        ("backward_weight_one_chunk", "pass dw_builder= to the stage"),
        ("scale_grads", "make the schedule with scale_grads=False, and scale in loss_fn"),
    ],
)
def test_the_remedies_of_stages(made: str, remedy: str) -> None:
    assert STAGE_NOT_CALLED[made].startswith(remedy)


def test_the_remedies_of_schedules() -> None:
    assert SCHEDULE_NOT_CALLED["_compute_loss"].startswith("make the schedule with loss_fn=")
    assert SCHEDULE_NOT_CALLED["_split_inputs"].endswith("args_chunk_spec= and kwargs_chunk_spec= say how to cut")


def test_a_method_that_was_put_on_the_stage_is_refused_too() -> None:
    stage: Any = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")
    told = "PipelineStage.forward_one_chunk is set to .*, and nothing here would use it: put what it does into"
    with pytest.raises(AttributeError, match=told):
        stage.forward_one_chunk = anything
    stage.__dict__["forward_one_chunk"] = anything
    with pytest.raises(InputError, match=r"PipelineStage defines forward_one_chunk\(\), and steps are run by one"):
        schedules.ScheduleGPipe(stage, 2)


def test_a_refused_method_may_come_from_a_class_between() -> None:
    between = overriding(PipelineStage, "scale_grads")
    stage = type("Below", (between,), {"__module__": "mine"})(nn.Linear(2, 2), 0, 1, "cpu")
    with pytest.raises(InputError, match=r"Below defines scale_grads\(\)"):
        schedules.ScheduleGPipe(stage, 2)


def test_the_methods_that_the_base_of_stages_demands_are_allowed() -> None:
    schedules.ScheduleGPipe(Own(nn.Linear(2, 2), 0, 1, "cpu"), 2)
    assert {name for name in STAGE_NOT_CALLED if name in _PipelineStageBase.__abstractmethods__} == {
        "_create_grad_recv_info",
        "_prepare_forward_infra",
        "_prepare_backward_infra",
    }


def test_a_stage_that_only_says_where_it_is_may_define_anything() -> None:
    mock = overriding(Mock, "forward_one_chunk")
    assert schedules.ScheduleInterleaved1F1B([mock(), mock()], 4).pipeline_order


def test_methods_that_are_called_are_honoured() -> None:
    seen: list[str] = []

    class Stage(PipelineStage):
        def clear_runtime_states(self) -> None:
            seen.append("cleared")
            super().clear_runtime_states()

    class Schedule(schedules.Schedule1F1B):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append("step")
            return super().step(*args, **kwargs)

    stages: list[PipelineStage] = [Stage(layer, index, 2, "cpu") for index, layer in enumerate(layers(2))]
    x, y = batch()
    Schedule(stages, 4, loss_fn=nn.functional.mse_loss).step(x, target=y)
    assert seen[0] == "step"
    assert "cleared" in seen
    assert_as_uncut(gradients_of(stages), 2)


def test_stages_that_are_no_list_and_numbers_that_are_none() -> None:
    stage: Any = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")
    with pytest.raises(
        InputError, match=r"stages is a list of the stages of this rank, got PipelineStage: give \[stage\]"
    ):
        schedules.ScheduleInterleaved1F1B(stage, 2)
    with pytest.raises(InputError, match="a schedule takes PipelineStages, got Linear"):
        schedules.Schedule1F1B(stage.submod, 2)
    for index, count, name in (("0", 1, "stage_index"), (0, 1.0, "num_stages"), (None, 1, "stage_index")):
        with pytest.raises(InputError, match=f"{name} must be an integer, got .*: give an int"):
            PipelineStage(nn.Linear(2, 2), index, count, "cpu")  # type: ignore[arg-type]
    assert PipelineStage(nn.Linear(2, 2), torch.tensor(0), 1, "cpu").is_first  # type: ignore[arg-type]
