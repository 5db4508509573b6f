"""Options of Trainer and of the pipeline, each beside Trainer on one process."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.integrations.trainer_cases import accuracy, as_torchrun, assert_same, make_trainer, sentences, train
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def logits_squared(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return a loss that is not the model's: a sum over tokens, divided by the items of all accumulated batches."""
    assert num_items_in_batch is not None
    per_token = outputs.logits.pow(2).mean(-1) + outputs.logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return per_token[..., :-1][labels[..., 1:] != -100].sum() / num_items_in_batch


OPTIONS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    # Without accumulation: a share of several batches' items is rounded to float32, which Adam makes more of.
    "compute_loss_func": {"compute_loss_func": logits_squared},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "no_clipping": {"max_grad_norm": 0.0},
    # One epoch: the order of the next is drawn from torch's default generator, from which steps of a pipeline draw too.
    "group_by_length": {"train_sampling_strategy": "group_by_length", "max_steps": 4},
    "tokens_seen": {"include_num_input_tokens_seen": "non_padding"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_trainer(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    options = {**OPTIONS[name], "eval_strategy": "steps", "eval_steps": 3, "compute_metrics": accuracy}
    expected = train(0, "causal", tmp_path / "plain", **options)
    run = functools.partial(train, pipeline={"microbatches": 4}, **options)
    for found in two_ranks.run(run, "causal", tmp_path / "pipeline"):
        assert_same(found, expected)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble", "auto"])
def test_schedules(schedule: str, two_ranks: Ranks, tmp_path: Path) -> None:
    expected = train(0, "tied", tmp_path / "plain", max_steps=3)
    pipeline = {"microbatches": 4, "schedule": schedule}
    for found in two_ranks.run(functools.partial(train, pipeline=pipeline, max_steps=3), "tied", tmp_path / "pipeline"):
        assert_same(found, expected)


def test_mixed_precision(two_ranks: Ranks, tmp_path: Path) -> None:
    """Microbatches round otherwise than a batch does: by about a bfloat16 digit of the logits."""
    options = {"bf16": True, "eval_strategy": "steps", "eval_steps": 3}
    expected = train(0, "causal", tmp_path / "plain", **options)
    run = functools.partial(train, pipeline={"microbatches": 4}, **options)
    for found in two_ranks.run(run, "causal", tmp_path / "pipeline"):
        assert_same(found, expected, tolerance=5e-3)


def test_two_pipelines_train_as_one_process_with_both_batches(four_ranks: Ranks, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 3, "compute_metrics": accuracy, "gradient_accumulation_steps": 2}
    options["eval_dataset"] = sentences()[:16]
    wide = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 16}
    expected = train(0, "tied", tmp_path / "plain", **options, **wide)
    run = functools.partial(train, pipeline={"stages": 2, "microbatches": 2}, per_device_train_batch_size=4, **options)
    run = functools.partial(run, per_device_eval_batch_size=8)
    for found in four_ranks.run(run, "tied", tmp_path / "pipeline"):
        for logs in (found.logs[-1], expected.logs[-1]):
            logs.pop("total_flos", None)  # each pipeline pads to the longest of its own samples
        assert_same(found, expected)


def predictions(rank: int, folder: Path, pipeline: dict[str, Any] | None = None) -> list[Any]:
    """Predict without training, with labels and without."""
    data = sentences()[:13]
    bare = [{name: value for name, value in sample.items() if name != "labels"} for sample in data]
    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer("causal", folder, pipeline, compute_metrics=accuracy)
        outputs = [trainer.predict(data), trainer.predict(bare)]
    return [(output.predictions, output.label_ids, output.metrics.get("test_accuracy")) for output in outputs]


def test_predictions_are_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    expected = predictions(0, tmp_path / "plain")
    for found in two_ranks.run(predictions, tmp_path / "pipeline", {"microbatches": 4}):
        for (logits, labels, metric), (others, own, reference) in zip(found, expected, strict=True):
            np.testing.assert_allclose(logits, others, rtol=1e-6, atol=1e-9)
            assert (labels is None) == (own is None)
            assert metric == reference


def test_a_compute_loss_of_the_users_own(two_ranks: Ranks, tmp_path: Path) -> None:
    expected = own_loss(0, tmp_path / "plain")
    for found in two_ranks.run(own_loss, tmp_path / "pipeline", {"microbatches": 4}):
        assert_same(found, expected)


def own_loss(rank: int, folder: Path, pipeline: dict[str, Any] | None = None) -> Any:
    """Train with a compute_loss that weighs classes."""
    from transformers import Trainer

    from pipecut.integrations.transformers import PipelineTrainer

    class Weighed:
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
            mean = (loss * (1 + labels)).mean()
            return (mean, outputs) if return_outputs else mean

    kinds = type("Plain", (Weighed, Trainer), {}), type("Pipelined", (Weighed, PipelineTrainer), {})
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "trainer": kinds}
    return train(rank, "classes", folder, pipeline, **options)
