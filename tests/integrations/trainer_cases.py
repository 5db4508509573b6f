"""Small models and data for trainers, one process and ranks alike, and what a run of them leaves."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.transformers_models import BOTH, DECODER, ENCODER

COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "total_flos", "train_loss", "epoch")
SAMPLES, IGNORED = 32, -100


def sentences(*, labels: str = "tokens") -> list[dict[str, Any]]:
    """Return samples of text with different lengths, some of whose labels do not count; or with a class each."""
    drawn, samples = random.Random(0), []
    for number in range(SAMPLES):
        ids = [drawn.randrange(3, 60) for _ in range(drawn.randrange(5, 12))]
        kept = [IGNORED] * (number % 4) + ids[number % 4 :]
        sample = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        samples.append({**sample, "labels": kept if labels == "tokens" else ids[0] % 2})
    return samples


def images() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": number % 2} for number in range(SAMPLES)
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate samples, padded to the longest of them."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    fills = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: torch.tensor([_filled(sample[name], longest, fill) for sample in samples])
        for name, fill in fills.items()
        if name in samples[0]
    }


def _filled(value: Any, length: int, fill: int) -> Any:
    return value + [fill] * (length - len(value)) if isinstance(value, list) else value


def accuracy(evaluated: Any) -> dict[str, float]:
    predictions = evaluated.predictions
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    return {"accuracy": float((logits.argmax(-1) == evaluated.label_ids).mean())}


def _model(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options)).double()

    return make


def _with_adapters() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    return peft.get_peft_model(_model("LlamaForCausalLM", "LlamaConfig", **DECODER)(), config).double()


@dataclass(frozen=True)
class Case:
    """One kind of model, and data that it trains on."""

    make: Callable[[], nn.Module]
    data: Callable[[], list[dict[str, Any]]] = sentences
    options: Mapping[str, Any] = field(default_factory=dict)


def _classes() -> list[dict[str, Any]]:
    return sentences(labels="classes")


_VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32}
_VIT |= {"patch_size": 8, "hidden_dropout_prob": 0.0}
CASES = {
    "causal": Case(_model("LlamaForCausalLM", "LlamaConfig", **DECODER)),
    "tied": Case(_model("LlamaForCausalLM", "LlamaConfig", **DECODER, tie_word_embeddings=True)),
    "small": Case(
        _model("LlamaForCausalLM", "LlamaConfig", **{**DECODER, "num_hidden_layers": 2}, tie_word_embeddings=True)
    ),
    "classes": Case(_model("BertForSequenceClassification", "BertConfig", **ENCODER, num_labels=2), _classes),
    "seq2seq": Case(_model("BartForConditionalGeneration", "BartConfig", **BOTH)),
    "vision": Case(_model("ViTForImageClassification", "ViTConfig", **_VIT), images),
    "adapters": Case(_with_adapters),
}


@contextlib.contextmanager
def as_torchrun() -> Iterator[None]:
    """Set what torchrun tells a process, in a rank of a pool, for as long as a trainer runs."""
    if not dist.is_initialized():
        yield
        return
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def make_trainer(case: str, folder: Path, pipeline: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return a trainer of a case: `PipelineTrainer` with arguments for a pipeline, `Trainer` without."""
    import transformers

    from pipecut.integrations.transformers import PipelineArguments, PipelineTrainer

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    given = {
        "data_collator",
        "compute_metrics",
        "callbacks",
        "compute_loss_func",
        "eval_dataset",
        "trainer",
    } & options.keys()
    kept = {name: options.pop(name) for name in given}
    kinds = kept.pop("trainer", (transformers.Trainer, PipelineTrainer))
    chosen = CASES[case]
    data = chosen.data()
    settings = {"per_device_train_batch_size": 8, "max_steps": 6, "logging_steps": 1, "learning_rate": 1e-3}
    settings |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = transformers.TrainingArguments(str(folder), **(settings | dict(chosen.options) | options))
    collate = padded if "input_ids" in data[0] else None
    kept = {"data_collator": collate, "train_dataset": data, "eval_dataset": data[:13], **kept}
    if pipeline is None:
        made = kinds[0](model=chosen.make(), args=args, **kept)
    else:
        made = kinds[1](model=chosen.make(), args=args, pipeline=PipelineArguments(**pipeline), **kept)
    made.remove_callback(transformers.PrinterCallback)
    return made


@dataclass(frozen=True)
class Trained:
    """Result of a training: the figures that were logged, and the weights of the model by name."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    steps: int


def train(
    rank: int,
    case: str,
    folder: Path,
    pipeline: Mapping[str, Any] | None = None,
    resume: str | bool | None = None,
    **options: Any,
) -> Trained:
    """Train a case, on this rank of a job or on one process."""
    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(case, folder, pipeline, **options)
        trainer.train(resume_from_checkpoint=resume)
    logs = [{name: entry[name] for name in COMPARED if name in entry} for entry in trainer.state.log_history]
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return Trained(logs, weights, trainer.state.global_step)


def assert_same(found: Trained, expected: Trained, tolerance: float = 1e-6, *, resumed: bool = False) -> None:
    """Compare every figure that was logged, and every weight; a resumed training has a mean loss of its own steps."""
    assert found.steps == expected.steps
    assert len(found.logs) == len(expected.logs)
    for own, other in zip(found.logs, expected.logs, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            if resumed and name == "train_loss":
                continue
            assert abs(value - other[name]) <= tolerance * max(1.0, abs(other[name])), (name, value, other[name])
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in found.weights.items():
        assert torch.allclose(weight, expected.weights[name], rtol=tolerance, atol=tolerance), name
