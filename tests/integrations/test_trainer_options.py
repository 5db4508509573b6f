"""Options of Trainer and of the pipeline, each beside Trainer on one process."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipecut.pipe_ir import Unsent, UnsentValue
from tests.integrations.trainer_cases import (
    CASES,
    accuracy,
    as_torchrun,
    assert_same,
    make_trainer,
    sentences,
    train,
)
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def logits_squared(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return a loss that is not the model's: a sum over tokens, divided by the items of all accumulated batches."""
    assert num_items_in_batch is not None
    per_token = outputs.logits.pow(2).mean(-1) + outputs.logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return per_token[..., :-1][labels[..., 1:] != -100].sum() / num_items_in_batch


OPTIONS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "compute_loss_func": {"compute_loss_func": logits_squared, "gradient_accumulation_steps": 2},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "no_clipping": {"max_grad_norm": 0.0},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},  # over two epochs
    "tokens_seen": {"include_num_input_tokens_seen": "non_padding"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_trainer(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    options = {**OPTIONS[name], "eval_strategy": "steps", "eval_steps": 3, "compute_metrics": accuracy}
    expected = train(0, "causal", tmp_path / "plain", **options)
    run = functools.partial(train, pipeline={"microbatches": 4}, **options)
    for found in two_ranks.run(run, "causal", tmp_path / "pipeline"):
        assert_same(found, expected)


@pytest.mark.parametrize(
    "schedule",
    sampled(
        ["GPipe", "Interleaved1F1B", "ZBVZeroBubble", "auto"], ("ZBVZeroBubble", "auto").__contains__, lambda name: True
    ),
)
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


class Dtypes:
    """A trainer whose loss is made by the user, and notes what it is made of."""

    seen: set[torch.dtype]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        self.seen = {outputs.logits.dtype, (outputs.logits @ outputs.logits.mT).dtype}
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


def kinds_of(mixin: type) -> tuple[type, type]:
    from transformers import Trainer

    from pipecut.integrations.transformers import PipelineTrainer

    return type("Plain", (mixin, Trainer), {}), type("Pipelined", (mixin, PipelineTrainer), {})


def dtypes_of_loss(rank: int, folder: Path, pipeline: dict[str, Any] | None = None) -> tuple[set[Any], Any]:
    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"bf16": True, "max_steps": 1, "trainer": kinds_of(Dtypes)}
        trainer = make_trainer("causal", folder, pipeline, **options)
        trainer.model.float()
        trainer.train()
        logits = trainer.predict(sentences()[:4]).predictions
    return getattr(trainer, "seen", {torch.float32}), logits.dtype


def test_outputs_that_were_not_sent_stay_under_bfloat16() -> None:
    """The conversion to float32 read them: any model with an output that only the caller uses failed its first step."""
    from pipecut.integrations.transformers.loss import in_full_precision

    trainer = SimpleNamespace(accelerator=SimpleNamespace(native_amp=True))
    unsent, ids = UnsentValue(Unsent("past_key_values", 0)), torch.arange(2)
    given = {"logits": torch.ones(2, dtype=torch.bfloat16), "past_key_values": (unsent,), "ids": ids}
    made = in_full_precision(trainer, given)
    assert made["logits"].dtype == torch.float32
    assert made["past_key_values"][0] is unsent
    assert made["ids"] is ids


def test_a_loss_of_the_users_own_sees_float32_under_bfloat16(two_ranks: Ranks, tmp_path: Path) -> None:
    assert dtypes_of_loss(0, tmp_path / "plain") == ({torch.float32}, np.float32)
    for found in two_ranks.run(dtypes_of_loss, tmp_path / "pipeline", {"microbatches": 4, "outputs": ["logits"]}):
        assert found == ({torch.float32}, np.float32)


class Scaled:
    """A trainer with float16 on a CPU, for which Accelerate turns it off."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)


def train_scaled(rank: int, folder: Path, pipeline: dict[str, Any] | None = None, **options: Any) -> tuple[Any, ...]:
    """Train in float16 with a scale that overflows at first."""
    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"fp16": True, "max_steps": 14, "lr_scheduler_type": "constant", "trainer": kinds_of(Scaled)}
        trainer = make_trainer("causal", folder, pipeline, **{**settings, **options})
        trainer.model.float()
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    changed = sum(float((value - before[name]).abs().sum()) for name, value in trainer.model.state_dict().items())
    norms = [entry["grad_norm"] for entry in logs]
    return [entry["loss"] for entry in logs], norms, changed, trainer.accelerator.scaler.state_dict()


@pytest.mark.parametrize("clips", [True, False])
def test_float16_with_a_gradient_scaler(clips: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    """Steps that overflow are left out on all ranks, and the scale is that of Trainer after each."""
    options = {"max_grad_norm": 1.0 if clips else 0.0}
    losses, norms, changed, scaler = train_scaled(0, tmp_path / "plain", **options)
    assert changed > 0
    assert scaler["scale"] < 2.0**22
    assert sum(map(math.isfinite, norms)) not in (0, len(norms))
    run = functools.partial(train_scaled, **options)
    for own_losses, own_norms, own_changed, own_scaler in two_ranks.run(run, tmp_path / "run", {"microbatches": 4}):
        assert own_scaler == scaler
        assert own_losses == pytest.approx(losses, rel=2e-3)
        finite = [value for value in own_norms if math.isfinite(value)]
        assert finite == pytest.approx([value for value in norms if math.isfinite(value)], rel=2e-2)
        assert own_changed == pytest.approx(changed, rel=2e-2)


def test_dropout_is_the_same_for_any_number_of_stages_and_after_a_resume(two_ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    options["gradient_accumulation_steps"] = 2
    alone = train_with_dropout(0, tmp_path / "alone", {"microbatches": 4}, **options)
    run = functools.partial(train_with_dropout, pipeline={"microbatches": 4}, **options)
    for found in two_ranks.run(run, tmp_path / "pipeline"):
        assert_same(found, alone)
    resume = str(tmp_path / "pipeline" / "checkpoint-2")
    again = train_with_dropout(0, tmp_path / "again", {"microbatches": 4}, resume=resume, **options)
    assert_same(again, alone, resumed=True)
    plain = train_with_dropout(0, tmp_path / "plain", **options)
    assert plain.logs[0]["loss"] != pytest.approx(alone.logs[0]["loss"], rel=1e-6)  # as the docstring says


def train_with_dropout(rank: int, folder: Path, pipeline: Any = None, **options: Any) -> Any:
    case = CASES["causal"]

    def make() -> Any:
        model: Any = case.make()
        for block in model.model.layers:
            block.mlp.down_proj.register_forward_hook(dropped)
        return model

    CASES["dropout"] = dataclasses.replace(case, make=make)
    return train(rank, "dropout", folder, pipeline, **options)


def dropped(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return torch.nn.functional.dropout(output, 0.2, module.training)


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
