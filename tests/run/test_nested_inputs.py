"""Nested positional inputs of stages that were cut by hand, with tensors that come from a graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, PlannedSchedule
from pipecut.schedule import plan_for
from tests.support.training import TIGHT, assert_same_gradients, gradients_of

WIDTH = 6


class Gather(nn.Linear):
    """Takes nested values, beside a tensor and a number, and a nested keyword."""

    def forward(self, x: Tensor, parts: dict[str, Any], power: int, *, shifts: tuple[Tensor, ...]) -> Tensor:
        x = x * parts["scale"] + parts["more"][0] * parts["more"][1]
        return torch.tanh(super().forward(x)) ** power + shifts[0]


class Model(nn.Module):
    """The stages one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Gather(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = self.parts[0](*args, **kwargs)
        for part in self.parts[1:]:
            x = part(x)
        return x


def call_of(encoder: nn.Module, leaf: Tensor, data: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One graph gives tensors of several arguments, at all depths; one more is a leaf, and one needs no gradient."""
    hidden = encoder(data).exp()
    return (hidden.tanh(), {"scale": hidden, "more": [leaf, data]}, 2), {"shifts": (hidden + leaf,)}


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_gradients_go_back_to_where_the_inputs_come_from(name: str) -> None:
    torch.manual_seed(0)
    model, encoder = Model().double(), nn.Linear(WIDTH, WIDTH).double()
    uncut, uncut_encoder = copy.deepcopy(model), copy.deepcopy(encoder)
    data, target, leaf = (torch.randn(7, WIDTH, dtype=torch.float64) for _ in range(3))
    leaves = [leaf.clone().requires_grad_() for _ in range(2)]

    args, kwargs = call_of(uncut_encoder, leaves[0], data)
    F.mse_loss(uncut(*args, **kwargs), target).backward()

    stages = [PipelineStage(part, index, 3, "cpu") for index, part in enumerate(model.parts)]
    schedule = PlannedSchedule(stages, plan_for(name, ranks=3, microbatches=3), F.mse_loss)
    args, kwargs = call_of(encoder, leaves[1], data)
    output = schedule.step(*args, target=target, **kwargs)

    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
    assert_same_gradients(gradients_of(encoder), gradients_of(uncut_encoder), TIGHT)
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=0, atol=TIGHT)
    torch.testing.assert_close(schedule.eval(*args, **kwargs), output)


class Writes(nn.Linear):
    """Changes what it was given, nested and by keyword."""

    def forward(self, x: list[Tensor], *, mask: Tensor) -> Tensor:
        return super().forward(x[0].add_(1)) * mask.mul_(2)


def test_a_microbatch_that_is_written_to_leaves_the_others_alone() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Writes(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]).double()
    uncut = copy.deepcopy(model)
    x, mask, target = (torch.randn(7, WIDTH, dtype=torch.float64) for _ in range(3))
    F.mse_loss(uncut[1](uncut[0]([x.clone()], mask=mask.clone())), target).backward()
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(model)]
    PlannedSchedule(stages, plan_for("1F1B", ranks=2, microbatches=3), F.mse_loss).step([x], mask=mask, target=target)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
