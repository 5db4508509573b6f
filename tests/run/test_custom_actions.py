"""A user's own way to do an action."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipecut import InputError, PipelineStage, Schedule1F1B, ScheduleDualPipeV
from pipecut.schedule import Action, Op

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def layers(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages)))


def stages_of(model: nn.Sequential) -> list[PipelineStage]:
    return [PipelineStage(module, index, len(model), "cpu") for index, module in enumerate(model)]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_trains(schedule: Any, model: nn.Sequential) -> None:
    uncut = copy.deepcopy(model)
    schedule.step(X, target=Y)
    nn.functional.mse_loss(uncut(X), Y).backward()
    for name, expected in gradients(uncut).items():
        torch.testing.assert_close(gradients(model)[name], expected, msg=name)


@pytest.mark.parametrize("op", [Op.OVERLAP_F_B, "OVERLAP_F_B"])
def test_overlaps_may_be_done_in_a_way_of_ones_own(op: Op | str) -> None:
    """Backward before forward, which an overlap allows; the microbatches are at hand."""
    done: list[Action] = []

    def backward_first(action: Action, context: Any) -> None:
        for part in reversed(action.parts):
            context.run(part)
        done.append(action)
        assert len(context.targets if context.targets is not None else context.args) in (0, 8)

    model = layers(4)
    schedule = ScheduleDualPipeV(stages_of(model), 8, nn.functional.mse_loss, ranks=2)
    schedule.register_custom_function(op, backward_first)
    assert_trains(schedule, model)
    planned = [action for row in schedule.plan.actions for action in row if action is not None and action.parts]
    assert sorted(map(repr, done)) == sorted(map(repr, planned))
    assert done


def test_only_known_actions_have_functions() -> None:
    schedule = Schedule1F1B(stages_of(layers(2)), 2, nn.functional.mse_loss)
    with pytest.raises(InputError, match="there is no action 'OVERLAP': custom functions are for FORWARD, "):
        schedule.register_custom_function("OVERLAP", lambda action, context: None)


def test_functions_are_registered_before_the_first_step() -> None:
    schedule = Schedule1F1B(stages_of(layers(2)), 2, nn.functional.mse_loss)
    schedule.step(X, target=Y)
    with pytest.raises(InputError, match="register custom functions before the first step"):
        schedule.register_custom_function("FORWARD", lambda action, context: None)
