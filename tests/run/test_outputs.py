"""Outputs that are not one row for each sample: merged where that is clear, otherwise an error before any gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, Schedule1F1B, StepError, TensorChunkSpec
from pipecut.run.schedule import PipelineSchedule
from tests.support.training import assert_same_gradients, gradients_of

SAMPLES, LENGTH, WORDS = 6, 5, 4


class Flat(nn.Module):
    """All words of all samples, one row each."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class OverSamples(nn.Module):
    """One row for all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(0)


def by_hand(last: nn.Module, microbatches: int, loss_fn: Any, **options: Any) -> tuple[nn.Linear, PipelineSchedule]:
    torch.manual_seed(0)
    first = nn.Linear(WORDS, WORDS)
    stages = [PipelineStage(first, 0, 2, "cpu"), PipelineStage(last, 1, 2, "cpu")]
    return first, Schedule1F1B(stages, microbatches, loss_fn, **options)


def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, LENGTH, WORDS, generator=numbers), torch.randint(
        WORDS, (SAMPLES, LENGTH), generator=numbers
    )


def of_words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


@pytest.mark.parametrize("flat_target", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 6])
def test_logits_with_a_row_for_each_word(microbatches: int, flat_target: bool) -> None:
    first, schedule = by_hand(Flat(), microbatches, of_words)
    x, y = batch()
    uncut = copy.deepcopy(first)
    expected = Flat()(uncut(x))
    of_words(expected, y).backward()
    output = schedule.step(x, target=y.flatten() if flat_target else y)
    torch.testing.assert_close(output, expected.detach())
    assert_same_gradients(gradients_of(first), gradients_of(uncut), 1e-5)


def test_one_microbatch_has_nothing_to_be_put_together() -> None:
    first, schedule = by_hand(OverSamples(), 1, lambda output, _: output.mean())
    x, y = batch()
    output = schedule.step(x, target=y)
    torch.testing.assert_close(output, OverSamples()(first(x)).detach())


@pytest.mark.parametrize("microbatches", [2, 3, 6])
def test_rows_that_are_no_samples_are_refused_before_there_are_gradients(microbatches: int) -> None:
    """20 rows, a multiple of the samples of a microbatch, are not enough to go by."""
    first, schedule = by_hand(OverSamples(), microbatches, lambda output, _: output.mean())
    x, _ = batch()
    with pytest.raises(StepError, match=r"output has \[20\] along dim 0\nsay in output_merge_spec how to merge"):
        schedule.step(x, target=torch.zeros(SAMPLES))
    assert_same_gradients(gradients_of(first), {"weight": None, "bias": None}, 0.0)


def test_a_merge_spec_that_does_not_fit_is_refused_before_there_are_gradients() -> None:
    first, schedule = by_hand(Flat(), 2, of_words, output_merge_spec={"logits": TensorChunkSpec(0)})
    x, y = batch()
    with pytest.raises(StepError, match=r"output_merge_spec\['logits'\] says how to treat a value that is not there"):
        schedule.step(x, target=y)
    assert_same_gradients(gradients_of(first), {"weight": None, "bias": None}, 0.0)
