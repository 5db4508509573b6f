"""Losses that layers make beside their output, in any stage: they reach the total with the right scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, PlannedSchedule, SplitPoint, pipeline
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.training import TIGHT, assert_same_gradients, gradients_of

WIDTH, EXPERTS, LAYERS, LENGTH = 6, 3, 4, 5
SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]


class Mixture(nn.Module):
    """Experts, all of them, by the weights of a router; and how unevenly it spreads each sample over them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.router(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        # Of each sample by itself: the mean over the batch is then the mean of the means over its parts.
        unevenness = (share.mean(1) ** 2).sum(-1) * EXPERTS
        return torch.tanh(made @ share[..., None]).squeeze(-1), unevenness


class Model(nn.Module):
    """A loss of its own: that of the answer, and those of all layers."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch
        self.layers = nn.ModuleList(Mixture() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        extra = []
        for layer in self.layers:
            x, unevenness = layer(x)
            extra.append(unevenness)
        every = torch.stack(extra)
        auxiliary = (every.mean(1) ** 2).sum() if self.by_batch else every.mean()
        answer = self.head(x)
        return {"loss": F.mse_loss(answer, labels) + 0.3 * auxiliary, "auxiliary": auxiliary, "answer": answer}


def model_and_batch(by_batch: bool) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = (torch.randn(7, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    return Model(by_batch).double(), {"x": x, "labels": y}


def traced_stages(model: Model, batch: dict[str, Tensor]) -> list[PipelineStage]:
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, LAYERS)}
    pipe = pipeline(model, (), dict(batch), split_spec=spec)
    return [pipe.build_stage(index, "cpu") for index in range(LAYERS)]


def step(name: str, stages: list[PipelineStage], batch: dict[str, Tensor]) -> tuple[Any, float]:
    chunks = FAMILIES[name].chunks
    plan = plan_for(name, ranks=LAYERS // chunks, chunks=chunks, microbatches=4)
    schedule = PlannedSchedule(stages, plan)
    output = schedule.step(**batch)
    return output, schedule.mean_loss()


def test_one_that_is_a_mean_over_samples_is_that_of_the_batch() -> None:
    model, batch = model_and_batch(by_batch=False)
    expected = model(**batch)
    expected["loss"].backward()
    gradients = gradients_of(model)
    stages = traced_stages(model, batch)
    for name in SCHEDULES:
        model.zero_grad(set_to_none=True)
        output, loss = step(name, stages, batch)
        assert_same_gradients(gradients_of(model), gradients, TIGHT)
        assert loss == pytest.approx(expected["loss"].item(), rel=1e-12)
        for key, value in output.items():
            torch.testing.assert_close(value, expected[key].detach(), msg=key)


def test_one_that_is_no_mean_over_samples_is_that_of_the_microbatches() -> None:
    """As without a pipeline, where microbatches run one after the other with the weights of their sizes."""
    model, batch = model_and_batch(by_batch=True)
    stages = traced_stages(model, batch)
    model.zero_grad(set_to_none=True)
    total = 0.0
    for start, size in ((0, 2), (2, 2), (4, 2), (6, 1)):
        part = {key: value.narrow(0, start, size) for key, value in batch.items()}
        loss = model(**part)["loss"] * (size / 7)
        loss.backward()
        total += loss.item()
    gradients = gradients_of(model)
    for name in SCHEDULES:
        model.zero_grad(set_to_none=True)
        _, loss = step(name, stages, batch)
        assert_same_gradients(gradients_of(model), gradients, TIGHT)
        assert loss == pytest.approx(total, rel=1e-12)
    assert total != pytest.approx(model(**batch)["loss"].item(), rel=1e-6)
