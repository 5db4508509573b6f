"""Published models, traced once with symbolic batch and sequence, trained with other sizes at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, Schedule1F1B, pipeline
from tests.support.training import Problem, assert_same_gradients, cut_step, uncut_step
from tests.support.transformers_models import make

SIZES = [(8, 10), (6, 7), (3, 13), (5, 2)]  # of three microbatches: even, uneven, of one sample
WITHIN = 1e-6  # two of these models compute their loss in single precision

DYNAMIC = {
    "llama": {"input_ids": {1: "seq"}},
    "gpt2": {"input_ids": {1: "seq"}},
    "bert": {"input_ids": {1: "seq"}, "attention_mask": {1: "seq"}, "labels": {1: "seq"}},
    # The sequence of a decoder has a length of its own, unless the user says otherwise.
    "t5": {"input_ids": {1: "seq"}, "labels": {1: "seq"}},
}


def own_loss(output: Any, target: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def text(batch: int, seq: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (batch, seq))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_lengths_that_nobody_named(name: str) -> None:
    """The lengths of T5's two sequences are free of each other."""
    model = make(name)[0].double()
    pipe = pipeline(model, (), text(2, 10), num_stages=2, dynamic="auto")
    lengths = {str(entry.spec.shape[1]) for entry in pipe.traced.inputs if entry.spec is not None}
    assert lengths == {"input_ids_dim1"} | ({"labels_dim1"} if name == "t5" else set())
    train(pipe, model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("llama", 4), ("bert", 1), ("t5", 4)])
def test_one_trace_serves_all_sizes(name: str, batch: int) -> None:
    """Where the user names the sequence of one input, that of the others is found to be the same."""
    model = make(name)[0].double()
    pipe = pipeline(model, (), text(batch, 10), num_stages=2, dynamic=DYNAMIC[name])
    shapes = {entry.path: entry.spec.shape for entry in pipe.traced.inputs if entry.spec is not None}
    assert {path: str(shape) for path, shape in shapes.items()} == dict.fromkeys(text(1, 1), "(batch, seq)")
    train(pipe, model)


def train(pipe: Pipe, model: nn.Module) -> None:
    """Train a step of each size beside the uncut model."""
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    schedule = Schedule1F1B(stages, 3, own_loss)
    for size in SIZES:
        problem = Problem(model, (), torch.zeros(size[0]), own_loss, text(*size))
        expected, actual = uncut_step(problem), cut_step(schedule, problem)
        assert actual.loss == pytest.approx(expected.loss, rel=WITHIN)
        assert_same_gradients(actual.gradients, expected.gradients, WITHIN)
