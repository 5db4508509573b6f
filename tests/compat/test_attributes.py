"""Attributes and options that code written for upstream reads, sets or passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeError, PipeWarning
from pipecut.compat import PipelineStage, SplitPoint, pipeline, schedules
from pipecut.compat.unsupported import ReplacedAttributeError
from pipecut.errors import InputError


def stages(count: int = 4) -> list[PipelineStage]:
    return [PipelineStage(nn.Linear(4, 4), index, count, "cpu") for index in range(count)]


def test_attributes_of_a_schedule() -> None:
    spec = (schedules.TensorChunkSpec(0),)
    schedule: Any = schedules.ScheduleInterleaved1F1B(stages(), 4, nn.functional.mse_loss, spec, ranks=2)
    assert schedule._has_backward
    assert not schedules.ScheduleInterleaved1F1B(stages(), 4, ranks=2)._has_backward
    assert (schedule.n_local_stages, schedule.rank) == (4, 0)
    assert schedule.number_of_rounds * schedule.microbatches_per_round == 4
    assert schedule._args_chunk_spec is spec
    assert schedule._kwargs_chunk_spec is schedule._output_merge_spec is None
    schedule.number_of_rounds = 7  # a schedule of the user's may set it
    assert schedule.number_of_rounds == 7


@pytest.mark.parametrize(
    ("name", "other", "remedy"),
    [
        ("loss_fn", nn.functional.l1_loss, "loss_fn="),
        ("_loss_fn", nn.functional.l1_loss, "loss_fn="),
        ("_n_microbatches", 2, "n_microbatches="),
        ("_stages", [], "those stages"),
        ("_stage", None, "that stage"),
        ("_has_backward", False, r"loss_fn=, or call eval\(\) for forwards only"),
        ("_output_merge_spec", schedules.TensorChunkSpec(1), "output_merge_spec="),
    ],
)
def test_attributes_of_a_schedule_that_are_settled(name: str, other: Any, remedy: str) -> None:
    spec = (schedules.TensorChunkSpec(0),)
    schedule: Any = schedules.ScheduleInterleaved1F1B(stages(), 4, nn.functional.mse_loss, spec, ranks=2)
    before = getattr(schedule, name)
    setattr(schedule, name, before)
    setattr(schedule, name, list(before) if isinstance(before, list) else before)
    told = f"{name} is .* and cannot be set to .*: make a schedule with {remedy}$"
    with pytest.raises(AttributeError, match=told) as caught:
        setattr(schedule, name, other)
    assert isinstance(caught.value, PipeError)
    assert getattr(schedule, name) is before


def test_what_is_set_before_a_schedule_is_made_is_set_anew_by_its_making() -> None:
    class Early(schedules.PipelineScheduleMulti):
        def __init__(self, made: Any, n_microbatches: int) -> None:
            self._n_microbatches, self._stages = n_microbatches, made
            super().__init__(made, n_microbatches)

    made = stages()
    early = Early(made, 4)
    assert (early._n_microbatches, early._stages) == (4, made)


def test_attributes_of_a_stage() -> None:
    made = stages(1)
    stage = made[0]
    assert (stage.chunks, stage.log_prefix, dict(stage.bwd_cache), dict(stage.dw_runner)) == (None, "[Stage 0]", {}, {})
    schedules.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss).step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert stage.chunks == 2
    output = stage.forward_one_chunk(0, (torch.ones(2, 4),))
    stage.backward_one_chunk(0, loss=output.sum(), full_backward=False)
    assert list(stage.dw_runner) == list(stage.bwd_cache) == [0]
    stage.backward_weight_one_chunk(0)
    assert not stage.dw_runner


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("get_fwd_recv_ops", "what is sent and received is the work of the schedule's executor"),
        ("args_recv_info", "what is sent and received is the work of the schedule's executor"),
        ("inputs_meta", "shapes follow from the sizes of each step"),
        ("backward_state", "what a backward has left is in stage.flights"),
        ("forward_maybe_with_nosync", "put what it does into the forward of the stage's module"),
        ("backward_maybe_with_nosync", "gradients are reduced once a step by the executor"),
        ("_retrieve_recv_activations", "what is sent and received is the work of the schedule's executor"),
        ("_retrieve_recv_grads", "what is sent and received is the work of the schedule's executor"),
        ("_map_tensor_from_recv_info", "what is sent and received is the work of the schedule's executor"),
        ("_get_init_p2p_neighbors_ops", "what is sent and received is the work of the schedule's executor"),
        ("_setup_forward_recv_info", "what is sent and received is the work of the schedule's executor"),
        ("_check_chunk_id", "the executor checks the order of calls, and what arrives"),
        ("_inference_mode", "shapes follow from the sizes of each step"),
        ("_user_meta", "shapes follow from the sizes of each step"),
        ("_fwd_outputs_for_bwd_meta", "shapes follow from the sizes of each step"),
        ("_compute_input_grads", "put what it does into hooks of the module"),
        ("_mesh_cache", "a stage finds its meshes by itself, in what it was made with: pass get_mesh="),
    ],
)
def test_attributes_of_a_stage_that_are_replaced(name: str, told: str) -> None:
    (stage,) = stages(1)
    with pytest.raises(ReplacedAttributeError, match=f"PipelineStage.{name} is not part of pipecut: {told}"):
        getattr(stage, name)
    assert not hasattr(stage, name)
    with pytest.raises(AttributeError, match="'PipelineStage' object has no attribute 'nothing'"):
        stage.nothing  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("_comp_type_to_function_map", r"call register_custom_function\(\)"),
        ("_split_inputs", "the microbatches of a step are cut, run and merged by step"),
        ("_initialize_stages", "stages are ready when they are made"),
        ("_stage_forward_initialized", "stages are ready when they are made"),
        ("_should_compute_loss", "the loss is made along with the output of the last stage"),
    ],
)
def test_attributes_of_a_schedule_that_are_replaced(name: str, told: str) -> None:
    schedule = schedules.ScheduleGPipe(stages(1), 2)
    with pytest.raises(AttributeError, match=f"ScheduleGPipe.{name} is not part of pipecut: {told}"):
        getattr(schedule, name)


def test_the_losses_of_a_step_are_held_while_it_runs_only() -> None:
    schedule: Any = schedules.ScheduleGPipe(stages(1), 2, loss_fn=nn.functional.mse_loss)
    schedule._internal_losses = []
    schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert schedule._internal_losses == []
    with pytest.raises(
        AttributeError, match=r"_internal_losses is \[\] and cannot be set to \[1\]: pass losses=, a list"
    ):
        schedule._internal_losses = [1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_backwards_are_counted_and_can_be_read_after_the_step(ranks: int) -> None:
    """The counts were gone with the step."""
    schedule = schedules.ScheduleInterleavedZeroBubble(stages(), 4, loss_fn=nn.functional.mse_loss, ranks=ranks)
    for _ in range(2):
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
        assert schedule.backward_counter == {0: 4, 1: 4, 2: 4, 3: 4}
    schedule.eval(torch.ones(4, 4))
    assert not schedule.backward_counter


def test_use_full_backward_is_taken_and_has_no_effect() -> None:
    for options in ({"use_full_backward": False}, {"use_full_backward": True}):
        with pytest.warns(PipeWarning, match="use_full_backward has no effect: backwards are whole"):
            schedules.PipelineScheduleMulti(stages(), 4, **options)
    with pytest.warns(PipeWarning, match="use_full_backward has no effect"):  # by position, before scale_grads
        assert not schedules.PipelineScheduleMulti(stages(), 4, None, None, None, None, False, False).scale_grads


def test_options_by_position() -> None:
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        cls: Any = schedules.get_schedule_class(name)
        schedule = cls(stages(), 4, None, None, None, None, False, True, True, ranks=2)
        assert (schedule.scale_grads, schedule._defer_pp_recv) == (False, True)
    merge = schedules.TensorChunkSpec(0)
    looped: Any = schedules.ScheduleLoopedBFS(stages(), 4, None, merge, False, True, True, ranks=2)
    assert (looped._output_merge_spec, looped.scale_grads, looped._defer_pp_recv) == (merge, False, True)
    spec = (schedules.TensorChunkSpec(0),)
    named: Any = schedules.ScheduleLoopedBFS(stages(), 4, args_chunk_spec=spec, kwargs_chunk_spec={}, ranks=2)
    assert (named._args_chunk_spec, named._kwargs_chunk_spec) == (spec, {})
    with pytest.raises(InputError, match="backward_requires_autograd=False is not known here"):
        schedules.ScheduleLoopedBFS(stages(), 4, None, None, True, False, ranks=2)


def test_the_text_of_actions() -> None:
    found = schedules._action_regex.match("12SEND_F3")
    assert found is not None
    assert found.groups() == ("12", "SEND_F", "3")
    assert schedules._action_regex.match("1UNSHARD") is not None


class Tied(nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(x))) * self.scale


def test_what_a_pipe_holds() -> None:
    model = Tied()
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"last": SplitPoint.BEGINNING})
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in pipe.named_parameters("model")][0] == "model.first.weight"
    assert len(list(pipe.parameters())) == 3
    assert [name for name, _ in pipe.named_buffers()] == ["scale"]
    assert len(list(pipe.buffers())) == 1
    assert pipe.state_dict().keys() == model.state_dict().keys()
    values = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    pipe.load_state_dict(values)
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, values[name]), name
    for index in range(2):
        for name, value in pipe.get_stage_module(index).state_dict().items():
            assert torch.equal(value, values[name]), name
    with pytest.raises(InputError, match="the state dict and the model differ in more, scale: give the model's own"):
        pipe.load_state_dict({**{name: values[name] for name in values if name != "scale"}, "more": torch.ones(1)})
    pipe.load_state_dict({"more": torch.ones(1)}, strict=False)
    with pytest.raises(AttributeError, match="Pipe.split_gm is not part of pipecut: a Pipe is not an nn.Module"):
        pipe.split_gm  # type: ignore[attr-defined] # noqa: B018
