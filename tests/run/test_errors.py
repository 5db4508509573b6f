"""What does not fit is refused before or in the step, with what is wrong, where, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import (
    InputError,
    PipeError,
    PipelineStage,
    PlanError,
    PlannedSchedule,
    Replicate,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    StepError,
    TensorChunkSpec,
    get_schedule_class,
)
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import Plan, plan_for
from tests.support.models import (
    WIDTH,
    Chain,
    chain_pipe,
    chain_problem,
    stages_of_chain,
    tangled_pipe,
    tangled_problem,
    traced_stages,
)
from tests.support.training import assert_trains_as_uncut


def chain_stages(count: int = 4, of: int | None = None) -> list[PipelineStage]:
    return [PipelineStage(nn.Linear(WIDTH, WIDTH), index, of or count, "cpu") for index in range(count)]


def a_schedule(stages: int = 2, microbatches: int = 2, loss_fn: Any = F.mse_loss, **options: Any) -> PipelineSchedule:
    plan = plan_for("1F1B", ranks=stages, microbatches=microbatches)
    return PlannedSchedule(chain_stages(stages), plan, loss_fn, **options)


# ----------------------------------------------------------------------------------------------- stages and plans


def test_stages_of_a_longer_pipeline() -> None:
    plan = plan_for("1F1B", ranks=4, microbatches=3)
    with pytest.raises(InputError, match="stage 0 is one of 8 stages, and the plan '1F1B' has 4"):
        PlannedSchedule(chain_stages(4, of=8), plan, F.mse_loss)


def test_missing_stages() -> None:
    plan = plan_for("1F1B", ranks=4, microbatches=3)
    with pytest.raises(InputError, match=r"stages \[2, 3\] are missing.*init_process_group"):
        PlannedSchedule(chain_stages()[:2], plan, F.mse_loss)


def test_a_stage_given_twice() -> None:
    stages = chain_stages()
    with pytest.raises(InputError, match="stage 1 was passed twice"):
        PlannedSchedule([*stages[:2], stages[1], stages[3]], plan_for("1F1B", ranks=4, microbatches=3), F.mse_loss)


def test_traced_stages_beside_others() -> None:
    traced = traced_stages(chain_pipe(chain_problem(4, samples=4)))
    stages = [*traced[:3], chain_stages()[3]]
    with pytest.raises(InputError, match="some stages are traced and others cut by hand"):
        PlannedSchedule(stages, plan_for("1F1B", ranks=4, microbatches=3), F.mse_loss)


def test_no_stage_and_no_stages() -> None:
    with pytest.raises(InputError, match="needs the stages of this rank; got none"):
        ScheduleInterleaved1F1B([], 2, F.mse_loss)
    with pytest.raises(InputError, match="takes PipelineStages, got Linear"):
        ScheduleInterleaved1F1B([nn.Linear(2, 2)], 2, F.mse_loss)  # type: ignore[list-item]


def test_stages_that_cannot_be_put_evenly() -> None:
    with pytest.raises(InputError, match="5 stages cannot be put evenly on 2 ranks"):
        ScheduleInterleaved1F1B(chain_stages(5), 2, F.mse_loss, ranks=2)


def test_a_v_of_three_stages_a_rank() -> None:
    with pytest.raises(ValueError, match="chunks=3 does not fit ZBVZeroBubble, which has 2 on each rank"):
        ScheduleZBVZeroBubble(chain_stages(6), 2, F.mse_loss, ranks=2)


def test_dualpipe_with_few_microbatches() -> None:
    with pytest.raises(ValueError, match="DualPipeV"):
        ScheduleDualPipeV(chain_stages(4), 2, F.mse_loss, ranks=2)


def test_a_plan_that_cannot_run() -> None:
    plan = Plan.from_actions({0: ["0F0", "0B0"], 1: ["1B0", "1F0"]})
    with pytest.raises(PlanError, match=r"1B0"):
        PlannedSchedule(chain_stages(2), plan, F.mse_loss).step(torch.ones(2, WIDTH), target=torch.ones(2, WIDTH))


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="Unknown schedule name '1F2B'. Did you mean '1F1B'"):
        get_schedule_class("1F2B")


@pytest.mark.parametrize("microbatches", [0, -1, 2.5, True])
def test_a_number_of_microbatches_that_is_none(microbatches: Any) -> None:
    with pytest.raises(PipeError, match="microbatches"):
        Schedule1F1B(chain_stages(2), microbatches, F.mse_loss)


# ----------------------------------------------------------------------------------------------------- the batch


def test_no_input() -> None:
    with pytest.raises(InputError, match="got no input on the rank of the first stage"):
        a_schedule().step(target=torch.ones(4, WIDTH))
    pipe = tangled_pipe(2)
    problem = tangled_problem(pipe.traced.model, 4)
    schedule = PlannedSchedule(traced_stages(pipe), plan_for("1F1B", ranks=2, microbatches=2), problem.loss_fn)
    with pytest.raises(InputError, match="got no input on the rank of the first stage"):
        schedule.step(target=problem.target)
    with pytest.raises(InputError, match="missing a required (keyword-only )?argument: 'mask'"):
        schedule.step(*problem.args, target=problem.target)
    with pytest.raises(InputError, match="too many positional arguments"):
        schedule.step(*problem.args, *problem.args, target=problem.target, **problem.kwargs)


def test_no_target_and_no_loss() -> None:
    x = torch.ones(4, WIDTH)
    with pytest.raises(InputError, match=r"got no target on the rank of the last stage: pass target="):
        a_schedule().step(x)
    with pytest.raises(InputError, match=r"a training step needs a loss: make the schedule with loss_fn="):
        a_schedule(loss_fn=None).step(x, target=x)
    assert a_schedule(loss_fn=None).eval(x).shape == x.shape


def test_no_samples() -> None:
    x = torch.ones(0, WIDTH)
    for run in (a_schedule(microbatches=3).step, a_schedule(microbatches=3).eval):
        with pytest.raises(InputError, match=r"0 samples cannot be cut into 3 microbatches .*: pass at least 1$"):
            run(x, target=x)


def test_a_target_of_another_size() -> None:
    with pytest.raises(InputError, match="the target has 5 rows, and the batch 4 samples"):
        a_schedule().step(torch.ones(4, WIDTH), target=torch.ones(5, WIDTH))


def test_arguments_of_different_sizes() -> None:
    with pytest.raises(InputError, match="do not have the same number of samples"):
        a_schedule().step(torch.ones(4, WIDTH), torch.ones(6, WIDTH), target=torch.ones(4, WIDTH))


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda output, target: output - target, r"a tensor of shape \[2, 6\]"),
        (lambda output, target: 3.0, "float"),
        (lambda output, target: None, "NoneType"),
        (lambda output, target: (output.mean(),), "tuple"),
    ],
)
def test_a_loss_that_is_no_number(loss_fn: Any, got: str) -> None:
    x = torch.ones(4, WIDTH)
    with pytest.raises(PipeError, match=f"loss_fn returned {got} for microbatch 0; it must return one number"):
        a_schedule(loss_fn=loss_fn).step(x, target=x)


def test_outputs_that_cannot_be_merged() -> None:
    stages = [
        PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 2, "cpu"),
        PipelineStage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0)), 1, 2, "cpu"),
    ]
    plan = plan_for("1F1B", ranks=2, microbatches=2)
    x, y = torch.ones(4, WIDTH), torch.ones(4)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.repeat_interleave(WIDTH))

    schedule = PlannedSchedule(stages, plan, loss_fn)
    with pytest.raises(PipeError, match="output_merge_spec"):
        schedule.step(x, target=y)
    assert all(parameter.grad is None for stage in stages for parameter in stage.submod.parameters())
    assert schedule.step(x, target=y, return_outputs=False) is None
    joined = PlannedSchedule(stages, plan, loss_fn, output_merge_spec=TensorChunkSpec(0)).step(x, target=y)
    assert joined.shape == (24,)


def test_samples_along_another_dim() -> None:
    class Transposed(nn.Linear):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x.t() + table)

    stages = [
        PipelineStage(Transposed(WIDTH, WIDTH), 0, 2, "cpu"),
        PipelineStage(nn.Linear(WIDTH, WIDTH), 1, 2, "cpu"),
    ]
    plan = plan_for("1F1B", ranks=2, microbatches=2)
    x, table = torch.ones(WIDTH, 5), torch.ones(WIDTH)
    specs = (TensorChunkSpec(1), Replicate())
    schedule = PlannedSchedule(stages, plan, F.mse_loss, args_chunk_spec=specs, target_chunk_spec=TensorChunkSpec(0))
    assert schedule.step(x, table, target=torch.ones(5, WIDTH)).shape == (5, WIDTH)
    with pytest.raises(InputError, match=r"do not have the same number of samples|the target has 5 rows"):
        PlannedSchedule(stages, plan, F.mse_loss).step(x, table, target=torch.ones(5, WIDTH))


# --------------------------------------------------------------------------------------------- failures in a step


def test_a_stage_that_returns_no_tensor() -> None:
    class Text(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return x, "text"

    stages = [PipelineStage(Text(), 0, 2, "cpu"), PipelineStage(nn.Linear(WIDTH, WIDTH), 1, 2, "cpu")]
    schedule = PlannedSchedule(stages, plan_for("1F1B", ranks=2, microbatches=2), F.mse_loss)
    with pytest.raises(PipeError, match="stage 0 returned str as output 1; every stage but the last returns a tensor"):
        schedule.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_a_failing_module_is_named_and_the_next_step_is_right(name: str) -> None:
    problem = chain_problem(4, samples=9)
    schedule = get_schedule_class(name)(
        stages_of_chain(problem.model),
        5,
        F.mse_loss,
        ranks=4 if name == "1F1B" else 2,  # type: ignore[arg-type]
    )
    calls: list[int] = []

    def hook(module: nn.Module, args: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("on purpose")

    handle = problem.model.get_submodule("1.0").register_forward_pre_hook(hook)
    with pytest.raises(
        StepError, match=r"failed in 1F3 \(stage 1, microbatch 3\), in module '0': ValueError: on pur"
    ) as caught:
        schedule.step(*problem.args, target=problem.target)
    assert isinstance(caught.value.__cause__, ValueError)
    handle.remove()
    assert_trains_as_uncut(schedule, problem)


def test_values_whose_shape_follows_from_the_data() -> None:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0] > 0]

    stages = [PipelineStage(Positive(), 0, 2, "cpu"), PipelineStage(nn.Linear(WIDTH, WIDTH), 1, 2, "cpu")]
    schedule = PlannedSchedule(
        stages, plan_for("1F1B", ranks=2, microbatches=2), lambda output, target: output.square().mean()
    )
    x = torch.ones(4, WIDTH)
    x[3] = -1
    with pytest.raises(PipeError, match=r"goes from stage 0 to stage 1, is float32\[1, 6\] here, and stage 1 expects"):
        schedule.step(x, target=x)


def test_a_parameter_without_a_way_to_the_loss_gets_zeros() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x), self.unused(x)

    class Join(Chain):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return super().forward(x)

    fork = Fork()
    stages = [PipelineStage(fork, 0, 2, "cpu"), PipelineStage(Join(1), 1, 2, "cpu")]
    x = torch.ones(4, WIDTH)
    PlannedSchedule(stages, plan_for("1F1B", ranks=2, microbatches=2), F.mse_loss).step(x, target=x)
    assert fork.used.weight.grad is not None
    assert fork.used.weight.grad.abs().max() > 0
    assert fork.unused.weight.grad is not None
    assert not fork.unused.weight.grad.any()


@pytest.mark.parametrize("timeout", [0, None, float("inf")])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")
    with pytest.raises(InputError, match=f"timeout must be a number of seconds above 0, got {timeout}"):
        Schedule1F1B(stage, 1, F.mse_loss, timeout=timeout)


def test_a_step_number_is_a_whole_number() -> None:
    stages = [PipelineStage(nn.Linear(2, 2), index, 2, "cpu") for index in range(2)]
    schedule = Schedule1F1B(stages, 2, F.mse_loss)
    schedule.step_number = 0.5  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"schedule.step_number is 0.5: set it to the number of the batch, an int, or"):
        schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))
