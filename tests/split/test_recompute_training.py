"""Stages that make masks and tables for themselves, trained: the gradients are those of the uncut model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipecut import Schedule1F1B, ScheduleZBVZeroBubble, pipeline
from tests.split.test_recompute import Decoder, Rotary, batch
from tests.support.sampling import sampled


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def uncut_gradients(model: nn.Module, call: tuple[Tensor, ...], target: Tensor) -> dict[str, Tensor | None]:
    reference = copy.deepcopy(model)
    loss_fn(reference(*call), target).backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "stages"),
    sampled([("1F1B", 2), ("1F1B", 3), ("1F1B", 4), ("ZBV", 2), ("ZBV", 4)], lambda case: case == ("ZBV", 2)),
)
def test_gradients_are_those_of_the_uncut_model(schedule: str, stages: int) -> None:
    model = Decoder(Rotary(persistent=True)).double()
    pipe = pipeline(model, batch(3), num_stages=stages)
    assert {value.stage for value in pipe.recomputed} == set(range(1, stages))
    built = [pipe.build_stage(index, "cpu") for index in range(stages)]
    runner = (
        Schedule1F1B(built, 3, loss_fn)
        if schedule == "1F1B"
        else ScheduleZBVZeroBubble(built, 3, loss_fn, ranks=stages // 2)
    )
    for size in (6, 5):
        call, target = batch(size), torch.randn(size, 12, 8, dtype=torch.float64)
        expected = uncut_gradients(model, call, target)
        runner.step(*call, target=target)
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=f"{name} at batch size {size}")
        model.zero_grad()
    assert {key for stage in pipe.stages for key in stage.state_dict()} == model.state_dict().keys()


def test_a_symbolic_sequence_is_recomputed_at_its_size() -> None:
    model = Decoder()
    dynamic = {"ids": {1: "seq"}, "attention_mask": {1: "seq"}}
    pipe = pipeline(model, batch(3), num_stages=3, dynamic=dynamic)
    assert {value.name for value in pipe.recomputed} == {"and_1", "rotary_0", "rotary_1"}
    for call in (batch(2, 7), batch(5, 20)):
        torch.testing.assert_close(pipe(*call), model(*call), rtol=0, atol=0)
