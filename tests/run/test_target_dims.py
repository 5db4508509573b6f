"""Targets whose samples are in another dim than the first, which nobody can guess."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipelineStage, Replicate, Schedule1F1B, TensorChunkSpec
from pipecut.run.calls import cut_target
from tests.support.training import TIGHT, assert_same_gradients, gradients_of

WORDS, LENGTH, SAMPLES = 11, 8, 4
IN_DIM_1 = (TensorChunkSpec(1),)


def sequence_first() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).double(), torch.randint(WORDS, (LENGTH, SAMPLES))


def words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, WORDS), target.reshape(-1))


def scheduled(model: nn.Sequential, loss_fn: Any = words, **options: Any) -> Schedule1F1B:
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(model)]
    return Schedule1F1B(stages, 3, loss_fn, args_chunk_spec=IN_DIM_1, output_merge_spec=TensorChunkSpec(1), **options)


def test_a_spec_says_where_the_samples_of_the_target_are() -> None:
    model, x = sequence_first()
    y = torch.randint(WORDS, (LENGTH, SAMPLES))
    uncut = copy.deepcopy(model)
    expected = words(uncut(x), y)
    expected.backward()
    schedule = scheduled(model, target_chunk_spec=TensorChunkSpec(1))
    output = schedule.step(x, target=y)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
    assert schedule.mean_loss() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(output, uncut(x).detach())


def test_without_a_spec_it_is_refused() -> None:
    model, x = sequence_first()
    remedy = "make the schedule with target_chunk_spec=TensorChunkSpec"
    text = rf"target has the shape \[8, 4\], and it is not known in which dim its 4 samples are, .*{remedy}"
    with pytest.raises(InputError, match=text):
        scheduled(model).step(x, target=torch.randint(WORDS, (LENGTH, SAMPLES)))
    with pytest.raises(InputError, match=r"target\['words'\] has the shape \[32\]"):
        scheduled(model).step(x, target={"words": torch.randint(WORDS, (LENGTH * SAMPLES,))})
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_value_for_each_sample_needs_no_spec() -> None:
    model, x = sequence_first()
    y = torch.randint(WORDS, (SAMPLES,))

    def last_word(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[-1], target)

    uncut = copy.deepcopy(model)
    last_word(uncut(x), y).backward()
    scheduled(model, last_word).step(x, target=y)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)


def test_a_nested_target() -> None:
    model, x = sequence_first()
    y = {"words": torch.randint(WORDS, (LENGTH, SAMPLES)), "weights": torch.rand(WORDS).double(), "power": 2}

    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        by_word = F.cross_entropy(output.reshape(-1, WORDS), target["words"].reshape(-1), reduction="none")
        return (by_word ** target["power"]).mean() * target["weights"].sum()

    uncut = copy.deepcopy(model)
    loss_fn(uncut(x), y).backward()
    specs = {"words": TensorChunkSpec(1), "weights": Replicate()}
    scheduled(model, loss_fn, target_chunk_spec=specs).step(x, target=y)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)


def test_specs_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"the target has 5 entries along dim 1, and the batch 4 samples"):
        cut_target(torch.zeros(4, 5), [2, 2], TensorChunkSpec(1))
    text = r"the target has 5 rows, and the batch 4 samples.*target_chunk_spec=TensorChunkSpec\(dim\); Replicate\(\) is"
    with pytest.raises(InputError, match=text):
        cut_target(torch.zeros(5, 4), [2, 2])
    with pytest.raises(InputError, match=r"target cannot be cut along dim 2: its shape is \[4, 5\]"):
        cut_target(torch.zeros(4, 5), [2, 2], TensorChunkSpec(2))
    with pytest.raises(InputError, match=r"target_chunk_spec\['word'\] says how to treat a value that is not there"):
        cut_target({"words": torch.zeros(4)}, [2, 2], {"word": TensorChunkSpec(0)})


def test_several_rows_to_a_sample() -> None:
    parts = cut_target((torch.arange(8), torch.tensor(3.0), "x"), [3, 1])
    assert [part[0].tolist() for part in parts] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert [part[1:] for part in parts] == [(torch.tensor(3.0), "x")] * 2


def test_several_rows_to_a_sample_in_all_parts() -> None:
    boxes, classes = torch.arange(32).reshape(8, 4), torch.arange(8)
    first, second = cut_target({"boxes": boxes, "classes": classes}, [3, 1])
    assert torch.equal(first["boxes"], boxes[:6])
    assert torch.equal(second["classes"], classes[6:])


def weighted(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with a weight for each word, in a table that belongs to all samples."""
    return F.cross_entropy(output.mean(1), target[0]) * target[1].mean()


def batch_first() -> tuple[nn.Sequential, Tensor, tuple[Tensor, Tensor]]:
    model, x = sequence_first()
    table = torch.rand(2 * SAMPLES, dtype=torch.double)
    return model, x.T.contiguous(), (torch.randint(WORDS, (SAMPLES,)), table)


def by_hand(model: nn.Sequential, loss_fn: Any, **options: Any) -> Schedule1F1B:
    return Schedule1F1B(
        [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(model)], 3, loss_fn, **options
    )


def test_a_table_that_happens_to_have_a_multiple_of_the_samples_is_in_doubt() -> None:
    model, x, target = batch_first()
    text = (
        r"target\[1\] has 8 rows, target\[0\] has 4, and the batch 4 samples: it is not known whether target\[1\] "
        r"has 2 rows for each sample, or belongs to all of them\. Make the schedule with target_chunk_spec=, in which "
        r"target\[1\] has TensorChunkSpec\(0\) if it is to be cut, and Replicate\(\) if it goes to every microbatch"
    )
    with pytest.raises(InputError, match=text):
        by_hand(model, weighted).step(x, target=target)
    with pytest.raises(InputError, match=text):
        cut_target(target, [2, 2], (TensorChunkSpec(0), None))
    assert all(parameter.grad is None for parameter in model.parameters())
    (whole,) = cut_target(target, [4])
    assert torch.equal(whole[1], target[1])  # one microbatch has all of it in any case


def test_a_spec_settles_the_doubt() -> None:
    model, x, target = batch_first()
    uncut = copy.deepcopy(model)
    weighted(uncut(x), target).backward()
    by_hand(model, weighted, target_chunk_spec=(None, Replicate())).step(x, target=target)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
    parts = cut_target(target, [3, 1], (None, TensorChunkSpec(0)))
    assert [len(part[1]) for part in parts] == [6, 2]


class SequenceFirst(nn.Linear):
    """Takes samples first, and returns them in dim 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


def test_samples_that_the_model_moves_to_another_dim() -> None:
    """The flattened output has as many words as the target: without the refusal they would be those of others."""
    model, x, _ = batch_first()
    model[1] = SequenceFirst(8, WORDS).double()
    y = torch.randint(WORDS, (LENGTH, SAMPLES))
    text = (
        r"target has the shape \[8, 4\], and the batch 4 samples: it is not known whether they are in dim 0, with 2 "
        r"rows each, or in dim 1\. Make the schedule with target_chunk_spec=TensorChunkSpec\(0\), or TensorChunkSpec\("
    )
    with pytest.raises(InputError, match=text):
        by_hand(model, words).step(x, target=y)
    uncut = copy.deepcopy(model)
    words(uncut(x), y).backward()
    by_hand(model, words, target_chunk_spec=TensorChunkSpec(1), output_merge_spec=TensorChunkSpec(1)).step(x, target=y)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
    assert [len(part) for part in cut_target(y, [2, 2], TensorChunkSpec(0))] == [4, 4]


def test_flattened_words_are_not_in_doubt() -> None:
    model, x, _ = batch_first()
    y = torch.randint(WORDS, (SAMPLES * LENGTH,))
    uncut = copy.deepcopy(model)
    words(uncut(x), y).backward()
    by_hand(model, words).step(x, target=y)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
