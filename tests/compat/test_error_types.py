"""Errors are of the kinds that code written for upstream catches, in one process and on ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipecut.compat import PipelineStage, SplitPoint, pipeline, schedules
from pipecut.compat._schedule_visualizer import get_schedule_ops
from pipecut.compat._utils import PipeliningMetadataError
from pipecut.errors import PipeError
from tests.support.ranks import Ranks


def one_stage(**options: Any) -> PipelineStage:
    return PipelineStage(nn.Linear(4, 4), 0, 1, "cpu", **options)


def trained(stage: PipelineStage, **options: Any) -> Any:
    schedule = schedules.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    return schedule.step(torch.ones(4, 4), **({"target": torch.ones(4, 4)} | options))


class Untraceable(nn.Module):
    """Fails on the example inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise TypeError("misfit")


def fails(kind: type[Exception], told: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=told) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, PipeError)


def test_kinds(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cut = {"1": SplitPoint.BEGINNING}
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec=cut)
    fails(ValueError, "stage_index=1 does not fit num_stages=1", PipelineStage, nn.Linear(4, 4), 1, 1, "cpu")
    fails(ValueError, "no stage 7: this pipe has stages 0 to 1", pipe.get_stage_module, 7)
    fails(ValueError, "both given", pipeline, model, (torch.ones(2, 4),), split_spec=cut, split_policy=lambda _: [])
    fails(
        RuntimeError, "mb_args must be a tuple of positional arguments, got Tensor", pipeline, model, torch.ones(2, 4)
    )
    fails(RuntimeError, "mb_kwargs must be a dict", pipeline, model, (torch.ones(2, 4),), 3)
    fails(RuntimeError, "misfit", pipeline, Untraceable(), (torch.ones(2, 4),))
    fails(RuntimeError, "got no target on the rank of the last stage", trained, one_stage(), target=None)
    fails(TypeError, "losses must be a list, which is filled; got int", trained, one_stage(), losses=3)
    runtime = schedules._PipelineScheduleRuntime([one_stage()], 2)
    for call in (runtime._load_csv, runtime._dump_csv, runtime._prepare_schedule_with_comms):
        fails(NotImplementedError, "format='zz' is not known", call, tmp_path / "order.csv", format="zz")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"input_args": (3,)}, r"Stage 0: input_args\[0\] has type int, and all of them must be tensors: pass other"),
        ({"input_args": (None,)}, r"Stage 0: input_args\[0\] is None, and all of them must be tensors"),
        ({"input_args": "x"}, r"Stage 0: input_args must be a tensor, or a tuple or list of tensors; got str"),
        ({"input_args": ({"ids": [3]},)}, r"Stage 0: input_args\[0\] has type int"),
        ({"output_args": (torch.ones(2), 3)}, r"Stage 0: output_args\[1\] has type int"),
        ({"output_grads": (3,)}, r"Stage 0: output_grads\[0\] has type int"),
        ({"input_grads": 3.5}, r"Stage 0: input_grads must be a tensor, .* got float"),
    ],
)
def test_examples_that_are_no_tensors(given: dict[str, Any], told: str) -> None:
    """They were taken, and a later step failed for "input_args , the number of samples aside"."""
    fails(PipeliningMetadataError, told, one_stage, **given)


def test_examples_of_gradients_may_be_none() -> None:
    x = torch.ones(2, 4)
    trained(one_stage(input_args=x, output_args=[x], input_grads=(None,), output_grads=(x, None)))


def too_many_ranks(rank: int) -> tuple[str, bool]:
    with pytest.raises(RuntimeError) as caught:
        PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
    return str(caught.value), isinstance(caught.value, PipeError)


@pytest.mark.distributed
def test_a_group_with_more_ranks_than_stages(two_ranks: Ranks) -> None:
    for message, own in two_ranks.run(too_many_ranks):
        assert own
        assert "Pipeline group size 2 cannot be larger than number of stages 1: every rank of the group has" in message
        assert "as group=, or cut the model into at least 2 stages" in message


def test_kinds_of_orders_that_are_not_there(tmp_path: Path) -> None:
    runtime = schedules._PipelineScheduleRuntime([one_stage()], 2)
    missing = tmp_path / "missing.csv"
    for format in ("compute_only", "compute_comms"):
        for kind in (AttributeError, ValueError):
            fails(kind, "Runtime has no order of actions yet: set pipeline_order", runtime._dump_csv, missing, format)
        for kind in (FileNotFoundError, ValueError):
            fails(kind, "missing.csv cannot be read: there is no such file", runtime._load_csv, missing, format)
    fails(AttributeError, "Runtime has no order of actions yet: set pipeline_order", runtime._simulate)
    assert not missing.exists()


@pytest.mark.parametrize(("name", "fits", "other"), [("ZBVZeroBubble", 2, 1), ("DualPipeV", 2, 3), ("GPipe", 1, 2)])
def test_kinds_of_other_numbers_of_stages_a_rank(name: str, fits: int, other: int) -> None:
    told = f"num_stages_per_rank to be {fits}, got {other}: Schedule{name} has {fits} on each rank"
    for kind in (AssertionError, ValueError):
        fails(kind, told, get_schedule_ops, name, 2, 8, num_stages_per_rank=other)
    assert len(get_schedule_ops(name, 2, 8, num_stages_per_rank=fits)) == 2


def test_a_private_name_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="Unknown schedule name '_ScheduleForwardOnly'.*Did you mean 'ForwardOnly'"):
        schedules.get_schedule_class("_ScheduleForwardOnly")


def test_forwards_only_have_no_loss() -> None:
    """The loss was computed, where code for upstream expects to be told that it is not."""
    x = torch.ones(4, 4)
    schedule = schedules._ScheduleForwardOnly(one_stage(), 2, loss_fn=nn.functional.mse_loss)
    for options, named in (
        ({"target": x}, "target"),
        ({"losses": []}, "losses"),
        ({"target": x, "losses": []}, "target and"),
    ):
        told = f"Forward-only schedule does not support loss computation, and got {named}.* call eval.. of another"
        fails(RuntimeError, told, schedule.step, x, **options)
        fails(RuntimeError, told, schedule.eval, x, **options)
    assert schedule.step(x).shape == x.shape


def forwards_only_on_ranks(rank: int) -> str:
    schedule = schedules._ScheduleForwardOnly(PipelineStage(nn.Linear(4, 4), rank, 2, "cpu"), 2)
    with pytest.raises(RuntimeError) as caught:
        schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), **({"target": torch.ones(4, 4)} if rank else {}))
    return str(caught.value)


@pytest.mark.distributed
def test_forwards_only_have_no_loss_on_ranks(two_ranks: Ranks) -> None:
    """Also where only the last rank was given a target: nobody waits for it."""
    messages = two_ranks.run(forwards_only_on_ranks)
    two_ranks.close()
    told = "rank 1 failed before its first action.*Forward-only schedule does not support loss computation"
    assert all(re.search(told, message) for message in messages), messages


def test_declared_tensors_are_compared_in_full_if_asked() -> None:
    x = torch.ones(3, 4)
    for side in ("input", "output"):
        stage = one_stage(**{f"{side}_args": (x,)})
        trained(stage)  # the number of samples may be another
        stage._runtime_validate = True
        told = f"Stage 0 forward {side}s.0.: shape mismatch: stage 0 was made with {side}_args float32.3, 4., and has "
        fails(PipeliningMetadataError, f"{told}float32.2, 4. in a microbatch", trained, stage)
    stage = one_stage(input_args=x[:2], output_args=x[:2])
    stage._runtime_validate = True
    trained(stage)


def declared_on_ranks(rank: int) -> tuple[bool, str]:
    x = torch.ones(3, 4)
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, "cpu", input_args=(x,), output_args=(x,))
    stage._runtime_validate = True
    schedule = schedules.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError) as caught:
        schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
    return isinstance(caught.value, PipeliningMetadataError), str(caught.value)


@pytest.mark.distributed
def test_declared_tensors_on_ranks(two_ranks: Ranks) -> None:
    (own, message), (_, told) = two_ranks.run(declared_on_ranks)
    two_ranks.close()
    assert own
    assert message == told
    assert "rank 0 failed before its first action" in message
    assert "stage 0 was made with input_args float32[3, 4], and has float32[2, 4] in a microbatch" in message


class Shaped(nn.Module):
    """A layer whose output can be made another one from outside, and the gradient of its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.becomes = lambda output: output

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.becomes(self.layer(x) if bias is None else self.layer(x) + bias)


def test_the_first_step_declares_shapes_and_dtypes_if_asked() -> None:
    """They were checked against `input_args` and `output_args` only, which frameworks leave out."""
    module, x = Shaped(), torch.ones(4, 4)
    stage = PipelineStage(module, 0, 1, "cpu")
    schedule = schedules.ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.sum())
    schedule.step(torch.ones(6, 4), target=torch.ones(6, 4))  # is not looked at: nothing was asked for yet
    stage._runtime_validate = True
    for _ in range(2):
        schedule.step(x, target=x, bias=x)
    told = (
        r"Stage 0 forward inputs.0.: shape mismatch: microbatch 0 has float32.4, 4., and had float32.2, 4. in the first"
    )
    fails(PipeliningMetadataError, told, lambda: schedule.step(x.repeat(2, 1), target=x.repeat(2, 1)))
    told = "forward keyword inputs.0.: dtype mismatch: microbatch 0 has float64.2, 4., and had float32.2, 4."
    fails(PipeliningMetadataError, told, lambda: schedule.step(x, target=x, bias=x.double()))
    module.becomes = lambda output: output.double()
    told = "forward outputs.0.: dtype mismatch: microbatch 0 has float64.2, 4., and had float32.2, 4. in the first step"
    fails(PipeliningMetadataError, told, lambda: schedule.step(x, target=x, bias=x))
    stage._runtime_validate = False
    schedule.step(x, target=x, bias=x)


def test_the_first_step_declares_gradients_if_asked() -> None:
    stages = [PipelineStage(Shaped(), index, 2, "cpu") for index in range(2)]
    schedule = schedules.ScheduleGPipe(stages, 2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 4)
    stages[0]._runtime_validate = True
    schedule.step(x, target=x)
    flight = stages[0].forward(0, [x[:2]], {}, training=True)
    assert len(flight.outputs) == 1
    told = "Stage 0 backward output_grads.0.: shape mismatch: microbatch 0 has float32.3, 4., and had float32.2, 4."
    fails(PipeliningMetadataError, told, lambda: stages[0].backward(0, [torch.ones(3, 4)], weights=True))


def later_shapes_on_ranks(rank: int) -> tuple[bool, str]:
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, "cpu")
    stage._runtime_validate = True
    schedule = schedules.Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        schedule.step(*((torch.ones(8, 4),) if rank == 0 else ()), target=torch.ones(8, 4) if rank else None)
    with pytest.raises(RuntimeError) as caught:
        schedule.step(*((torch.ones(4, 4),) if rank == 0 else ()), target=torch.ones(4, 4) if rank else None)
    return isinstance(caught.value, PipeliningMetadataError), str(caught.value)


@pytest.mark.distributed
def test_shapes_of_later_steps_on_ranks(two_ranks: Ranks) -> None:
    (own, message), (_, told) = two_ranks.run(later_shapes_on_ranks)
    two_ranks.close()
    assert own
    assert message == told
    assert "rank 0 failed before its first action" in message
    assert "Stage 0 forward inputs[0]: shape mismatch: microbatch 0 has float32[2, 4], and had float32[4, 4]" in message


def no_target_on_ranks(rank: int) -> str:
    schedule = schedules.Schedule1F1B(PipelineStage(nn.Linear(4, 4), rank, 2, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError) as caught:
        schedule.step(torch.ones(4, 4))
    return str(caught.value)


@pytest.mark.distributed
def test_no_target_on_ranks(two_ranks: Ranks) -> None:
    messages = two_ranks.run(no_target_on_ranks)
    two_ranks.close()
    assert all("got no target on the rank of the last stage" in message for message in messages)
