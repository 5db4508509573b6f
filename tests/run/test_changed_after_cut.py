"""A model that is changed after it was cut, or whose stages are: found when a step begins, with a remedy that works."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from pipecut import Schedule1F1B, pipeline
from pipecut.errors import ChangedModelError
from pipecut.pipe import Pipe
from pipecut.stage import PipelineStage, StageOrigin
from tests.support.training import Problem, assert_trains_as_uncut

Cut = tuple[nn.Module, Pipe, list[PipelineStage], Schedule1F1B]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 2)).double()


def cut(model: nn.Module | None = None) -> Cut:
    model = net() if model is None else model
    pipe = pipeline(model, (torch.ones(2, 4).double(),), num_stages=2)
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    return model, pipe, stages, Schedule1F1B(stages, n_microbatches=2, loss_fn=nn.functional.mse_loss)


def problem(model: nn.Module) -> Problem:
    torch.manual_seed(4)
    x, y = torch.randn(4, 4).double(), torch.randn(4, 2).double()
    return Problem(model, (x,), y, nn.functional.mse_loss)


def step(schedule: Schedule1F1B) -> Tensor:
    given = problem(nn.Identity())
    output: Tensor = schedule.step(*given.args, target=given.target)
    return output


def other_values(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(value, 0.1) for name, value in module.state_dict().items()}


def test_parameters_of_the_model_that_were_replaced() -> None:
    """load_state_dict(assign=True) left the stages with the values from before, and trained those."""
    model, _, _, schedule = cut()
    model.load_state_dict(other_values(model), assign=True)
    with pytest.raises(ChangedModelError, match=r"0.weight, 0.bias of the model are other parameters.*stage 0"):
        step(schedule)


def test_a_parameter_that_was_replaced_by_one_in_the_memory_of_another() -> None:
    """With the other stages gone, assign=True makes a parameter where it has just freed one, which looked known."""
    for layers in range(2, 24):
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
        name = f"{layers - 1}.weight"
        stage = nn.Sequential()
        stage.add_module(str(layers - 1), nn.Linear(2, 2, bias=False))
        stage[0].weight = model[-1].weight
        origin = StageOrigin(1, stage, model, {name: (1,)})
        model.load_state_dict(other_values(model), assign=True)
        with pytest.raises(ChangedModelError, match=f"^{name} of the model are other parameters"):
            origin.check_unchanged(stage)


def test_values_loaded_without_replacing_parameters() -> None:
    model, _, _, schedule = cut(net().eval())
    model.load_state_dict(other_values(model))
    assert_trains_as_uncut(schedule, problem(model))


def test_values_loaded_into_the_stages() -> None:
    model, _, stages, schedule = cut(net().eval())
    whole = other_values(model)
    model.load_state_dict(whole, assign=True)
    for stage in stages:
        stage.submod.load_state_dict({name: whole[name] for name in stage.submod.state_dict()}, assign=True)
    reference = copy.deepcopy(model)
    given = problem(reference)
    nn.functional.mse_loss(reference(*given.args), given.target).backward()
    step(schedule)
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            assert torch.allclose(parameter.grad, reference.get_parameter(name).grad), name  # type: ignore[arg-type]


def test_cut_again_after_parameters_were_replaced() -> None:
    model, _, _, _ = cut(net().eval())
    model.load_state_dict(other_values(model), assign=True)
    assert_trains_as_uncut(cut(model)[-1], problem(model))


def test_parameters_of_a_stage_that_were_replaced_after_the_optimizer_was_made() -> None:
    """The optimizer went on with parameters that no stage used: nothing was trained."""
    _, _, stages, schedule = cut()
    optimizer = torch.optim.SGD([each for stage in stages for each in stage.submod.parameters()], lr=0.1)
    step(schedule)
    stages[1].submod.load_state_dict(other_values(stages[1].submod), assign=True)
    with pytest.raises(ChangedModelError, match="of stage 1 were replaced after the optimizer was made"):
        step(schedule)
    del optimizer
    torch.optim.SGD([each for stage in stages for each in stage.submod.parameters()], lr=0.1)
    gc.collect()
    step(schedule)
    step(schedule)


def test_parameters_that_the_model_got_after_the_cut() -> None:
    model, _, _, schedule = cut()
    model[0].lora = nn.Linear(4, 4).double()
    with pytest.raises(ChangedModelError, match=r"the model got 0.lora.weight, 0.lora.bias after pipeline\(\)"):
        step(schedule)


def test_parameters_added_to_a_stage() -> None:
    _, _, stages, schedule = cut()
    stages[0].submod.get_submodule("0").scale = nn.Parameter(torch.ones(1))
    step(schedule)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_was_switched_and_stages_that_were_not(training: bool) -> None:
    model, pipe, _, schedule = cut(net().train(not training))
    model.train(training)
    modes = ("training", "evaluation") if training else ("evaluation", "training")
    for run in (step, lambda schedule: schedule.eval(*problem(model).args)):
        with pytest.raises(ChangedModelError, match=f"the model was put in {modes[0]} mode.*stage is in {modes[1]}"):
            run(schedule)
    pipe.train(training)
    step(schedule)


def test_a_model_that_was_switched_back() -> None:
    model, _, _, schedule = cut()
    model.eval()
    model.train()
    step(schedule)


def test_stages_that_were_switched_while_the_model_was_not() -> None:
    """As documented: the mode of an evaluation is that of the stages."""
    model, _, stages, schedule = cut()
    given = problem(model)
    for stage in stages:
        stage.submod.eval()
    assert torch.equal(schedule.eval(*given.args), copy.deepcopy(model).eval()(*given.args))
    for stage in stages:
        stage.submod.train()
    step(schedule)


def test_stages_that_were_switched_after_both_had_been() -> None:
    """Who switches a stage by itself, and the model not, means it; who then switches the model alone does not."""
    model, pipe, _, schedule = cut()
    pipe.eval()
    model.eval()
    step(schedule)
    pipe.train()
    step(schedule)
    pipe.eval()
    model.train()
    with pytest.raises(ChangedModelError, match="the model was put in training mode"):
        step(schedule)


def test_a_part_of_the_model_that_was_switched() -> None:
    model, _, stages, schedule = cut()
    model[1].eval()
    with pytest.raises(ChangedModelError, match=r"'1' of the model.*stage.submod.get_submodule\('1'\).eval\(\)"):
        step(schedule)
    stages[0].submod.get_submodule("1").eval()
    assert_trains_as_uncut(schedule, problem(model))


def test_a_part_of_a_stage_that_was_replaced_has_a_mode_of_its_own() -> None:
    model, _, stages, schedule = cut()
    old = stages[0].submod.get_submodule("1")
    setattr(stages[0].submod, "1", nn.Identity())
    model[1].eval()
    step(schedule)
    assert old.training


def test_stages_keep_no_model_alive() -> None:
    model, pipe, stages, schedule = cut()
    gone = weakref.ref(model)
    del model, pipe
    gc.collect()
    assert gone() is None
    step(schedule)
    assert all(stage.origin is not None and stage.origin.model is None for stage in stages)
