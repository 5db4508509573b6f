"""Stages that begin with an operation in place, and keywords that come from a graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipelineStage, PlannedSchedule
from pipecut.errors import PipeError
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import plan_for
from tests.support.training import TIGHT, Problem, assert_same_gradients, assert_trains_as_uncut, gradients_of

WIDTH = 6


def scheduled(name: str, parts: Iterable[nn.Module], **options: Any) -> PipelineSchedule:
    modules = list(parts)
    stages = [PipelineStage(part, index, len(modules), "cpu") for index, part in enumerate(modules)]
    return PlannedSchedule(stages, plan_for(name, ranks=len(modules), microbatches=3), F.mse_loss, **options)


def problem_for(model: nn.Module, needs_gradient: bool = False) -> Problem:
    torch.manual_seed(1)
    x, y = (torch.randn(7, WIDTH, dtype=torch.float64) for _ in range(2))
    return Problem(model, (x.requires_grad_(needs_gradient),), y, F.mse_loss)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_a_stage_that_begins_with_an_operation_in_place(name: str) -> None:
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), block()).double()
    schedule = scheduled(name, model)
    with pytest.warns(UserWarning, match="the module of stage [12] writes to its inputs in place, and gets copies"):
        assert_trains_as_uncut(schedule, problem_for(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trains_as_uncut(schedule, problem_for(model), times=2)


class Written(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(2)
        return super().forward(x)


def test_a_write_to_a_parameter_stays_an_error() -> None:
    schedule = scheduled("1F1B", [nn.Linear(WIDTH, WIDTH), Written(WIDTH, WIDTH)])
    for _ in range(2):
        with pytest.raises(
            PipeError, match="a leaf Variable that requires grad is being used in an in-place operation"
        ):
            schedule.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))


class Shifted(nn.Linear):
    """Takes a keyword of its own."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return torch.tanh(super().forward(x if shift is None else x + shift))


class Scaled(nn.Linear):
    """Takes another one."""

    def forward(self, x: Tensor, *, scales: dict[str, Tensor]) -> Tensor:
        return torch.tanh(super().forward(x)) * scales["all"]


class Model(nn.Module):
    """The parts one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Shifted(WIDTH, WIDTH), Scaled(WIDTH, WIDTH), Shifted(WIDTH, WIDTH)])

    def forward(self, x: Tensor, shift: Tensor, scales: dict[str, Tensor]) -> Tensor:
        x = self.parts[1](self.parts[0](x, shift), scales=scales)
        return self.parts[2](x, shift)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize("by_name", [True, False])
def test_keywords_go_to_those_who_take_them_and_gradients_go_back(name: str, by_name: bool) -> None:
    torch.manual_seed(0)
    model, encoder = Model().double(), nn.Linear(WIDTH, WIDTH).double()
    uncut, uncut_encoder = copy.deepcopy(model), copy.deepcopy(encoder)
    x, y, scale = (torch.randn(7, WIDTH, dtype=torch.float64) for _ in range(3))

    def keywords(source: nn.Module, leaf: Tensor) -> dict[str, Any]:
        return {"shift": source(x), "scales": {"all": leaf}}

    leaves = [scale.clone().requires_grad_() for _ in range(2)]
    F.mse_loss(uncut(x, **keywords(uncut_encoder, leaves[0])), y).backward()
    schedule = scheduled(name, model.parts)
    given = keywords(encoder, leaves[1])
    schedule.step(*(() if by_name else (x,)), target=y, **given, **({"x": x} if by_name else {}))
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
    assert_same_gradients(gradients_of(encoder), gradients_of(uncut_encoder), TIGHT)
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
    schedule.eval(x, target=y, **keywords(encoder, scale))


def test_a_keyword_that_nobody_takes() -> None:
    schedule = scheduled("1F1B", Model().parts)
    text = (
        r"got the keyword 'shifts', which the forward of no stage in this process takes \(they take x, shift, scales\)"
    )
    with pytest.raises(InputError, match=rf"{text}\. Did you mean 'shift'"):
        schedule.step(torch.ones(4, WIDTH), shifts=torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
