"""What ranks do in the tests of training: the same model on each, trained in parts, beside the uncut one."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipecut import PipelineStage, PipeWarning, PlannedSchedule, get_schedule_class
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import Plan, plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.models import by_hand_model, by_hand_problem, tangled_loss, tangled_pipe, tangled_problem
from tests.support.nested_values import assert_same
from tests.support.training import (
    TIGHT,
    Problem,
    assert_same_gradients,
    gradients_of,
    uncut_eval,
    uncut_step,
)


@dataclass(frozen=True)
class Cut:
    """A model of which this rank holds some stages."""

    rank: int
    plan: Plan
    model: nn.Module
    stages: list[PipelineStage]
    traced: bool

    @property
    def is_first(self) -> bool:
        return self.rank == self.plan.placement.rank_of[0]

    @property
    def is_last(self) -> bool:
        return self.rank == self.plan.placement.rank_of[-1]

    def problem(self, samples: int, seed: int = 0) -> Problem:
        return (tangled_problem if self.traced else by_hand_problem)(self.model, samples, seed)

    def step(self, schedule: PipelineSchedule, problem: Problem, losses: list[Tensor] | None = None) -> Any:
        """A training step with what this rank has: the inputs, the target, both, or nothing."""
        args, kwargs = (problem.args, problem.kwargs) if self.is_first else ((), {})
        target = problem.target if self.is_last else None
        return schedule.step(*args, target=target, losses=losses, **kwargs)

    def eval(self, schedule: PipelineSchedule, problem: Problem) -> Any:
        args, kwargs = (problem.args, problem.kwargs) if self.is_first else ((), {})
        return schedule.eval(*args, target=problem.target if self.is_last else None, **kwargs)

    def held(self) -> set[str]:
        """The model's names of the parameters that this rank trains."""
        mine = {id(parameter) for stage in self.stages for parameter in stage.submod.parameters()}
        names = self.model.named_parameters(remove_duplicate=False)
        return {name for name, parameter in names if id(parameter) in mine}


def cut_model(rank: int, plan: Plan, traced: bool) -> Cut:
    """The stages of a plan that this rank holds."""
    mine = plan.placement.stages_of[rank]
    if traced:
        pipe = tangled_pipe(plan.stages)
        return Cut(rank, plan, pipe.traced.model, [pipe.build_stage(index, "cpu") for index in mine], traced)
    model = by_hand_model(plan.stages)
    stages = [PipelineStage(model.parts[index], index, plan.stages, "cpu") for index in mine]
    return Cut(rank, plan, model, stages, traced)


def schedule_for(cut: Cut, name: str, loss_fn: Any) -> PipelineSchedule:
    """A schedule by its name, as users make them; with one stage on a rank they give the stage itself."""
    microbatches = cut.plan.microbatches
    if name not in FAMILIES:
        return PlannedSchedule(cut.stages, cut.plan, loss_fn)
    given: Any = cut.stages[0] if FAMILIES[name].chunks == 1 else cut.stages
    return get_schedule_class(name)(given, microbatches, loss_fn)


def check_schedule(rank: int, world: int, name: str, traced: bool, counts: Sequence[int]) -> None:
    """Steps and evaluations with several numbers of microbatches."""
    for microbatches in counts:
        plan = plan_for(name, ranks=world, microbatches=microbatches)
        cut = cut_model(rank, plan, traced)
        schedule = schedule_for(cut, name, cut.problem(1).loss_fn)
        assert schedule.plan.actions == plan.actions
        if microbatches == counts[0]:
            check_eval(cut, schedule, cut.problem(microbatches + 1, seed=3))
        check_steps(cut, schedule, cut.problem(microbatches + 2), times=2)
        check_eval(cut, schedule, cut.problem(2 * microbatches, seed=1))
        if microbatches == counts[-1]:
            check_few_samples(cut, schedule)


def check_plan(rank: int, plan: Plan, traced: bool) -> None:
    """Steps and an evaluation by any plan."""
    cut = cut_model(rank, plan, traced)
    schedule = PlannedSchedule(cut.stages, plan, cut.problem(1).loss_fn)
    check_steps(cut, schedule, cut.problem(plan.microbatches + 2), times=2)
    check_eval(cut, schedule, cut.problem(2 * plan.microbatches, seed=1))
    check_few_samples(cut, schedule)


def check_few_samples(cut: Cut, schedule: PipelineSchedule) -> None:
    """A step and an evaluation with fewer samples than microbatches: all ranks run as many as there are."""
    samples = max(1, schedule.n_microbatches - 1)
    check_eval(cut, schedule, cut.problem(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the batch has", PipeWarning)  # on the rank of the first stage
        check_steps(cut, schedule, cut.problem(samples))
    check_eval(cut, schedule, cut.problem(samples))


def check_steps(cut: Cut, schedule: PipelineSchedule, problem: Problem, times: int = 1) -> None:
    """Steps that add up, against the uncut model on this very rank."""
    expected = uncut_step(problem, times)
    cut.model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for _ in range(times):
        output = cut.step(schedule, problem, losses)
    held = cut.held()
    assert_same_gradients(
        gradients_of(cut.model),
        {name: gradient if name in held else None for name, gradient in expected.gradients.items()},
        TIGHT,
    )
    assert abs(schedule.mean_loss() - expected.loss) < TIGHT
    if cut.is_last:
        assert len(losses) == min(len(problem.target), schedule.n_microbatches)
        assert_same(output, {key: value.detach() for key, value in expected.output.items()}, "output", TIGHT)
    else:
        assert output is None
        assert not losses


def check_eval(cut: Cut, schedule: PipelineSchedule, problem: Problem) -> None:
    """An evaluation, which changes no gradient."""
    before = gradients_of(cut.model)
    output = cut.eval(schedule, problem)
    expected = uncut_eval(problem)
    assert_same_gradients(gradients_of(cut.model), before, 0.0)
    assert abs(schedule.mean_loss() - problem.loss_fn(expected, problem.target).item()) < TIGHT
    if cut.is_last:
        assert_same(output, expected, "output of eval", TIGHT)
    else:
        assert output is None


def train_tied(rank: int, world: int, name: str, steps: int) -> dict[str, str]:
    """Optimizer steps beside the uncut model; in the end, digests of the bits of all parameters of this rank."""
    plan = plan_for(name, ranks=world, microbatches=4)
    pipe = tangled_pipe.__wrapped__(plan.stages)  # one of its own, for its weights change
    stages = [pipe.build_stage(index, "cpu") for index in plan.placement.stages_of[rank]]
    cut = Cut(rank, plan, pipe.traced.model, stages, traced=True)
    uncut = copy.deepcopy(cut.model)
    schedule = schedule_for(cut, name, tangled_loss)
    held = cut.held()
    mine = [parameter for key, parameter in cut.model.named_parameters() if key in held]
    optimizers = [torch.optim.AdamW(parameters, lr=0.05) for parameters in (mine, uncut.parameters())]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in (0, 1):  # two steps add up
            problem = cut.problem(6, seed=2 * step + part)
            cut.step(schedule, problem)
            tangled_loss(uncut(*problem.args, **problem.kwargs), problem.target).backward()
        for optimizer in optimizers:
            optimizer.step()
        expected = dict(uncut.named_parameters())
        for key, parameter in cut.model.named_parameters():
            if key in held:
                torch.testing.assert_close(parameter, expected[key], rtol=1e-8, atol=1e-8)
    return {
        key: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for stage in stages
        for key, parameter in stage.submod.named_parameters()
    }
