"""Fine-tunes adapters of peft on questions and answers with PipelineTrainer, a stage on each rank.

    torchrun --nproc-per-node=2 examples/finetune_lora.py --output out

Samples have different lengths, and only answers count. What is saved are the adapters alone.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from trainer import small_llama  # of this folder: in your own script, AutoModelForCausalLM.from_pretrained(...)
from transformers import TrainingArguments

from pipecut.integrations.transformers import PipelineArguments, PipelineTrainer

IGNORED, PADDING = -100, 0


def questions(count: int) -> list[dict[str, list[int]]]:
    """Return sums with their results, as bytes; labels count where the answer is."""
    drawn, samples = random.Random(0), []
    for _ in range(count):
        one, other = drawn.randrange(1000), drawn.randrange(10)
        question, answer = list(f"{one}+{other}=".encode()), list(f"{one + other};".encode())
        samples.append({"input_ids": question + answer, "labels": [IGNORED] * len(question) + answer})
    return samples


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad samples to the longest of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, fill: int) -> Tensor:
        return torch.tensor([sample[name] + [fill] * (longest - len(sample[name])) for sample in samples])

    mask = [[1] * len(sample["input_ids"]) + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    return {
        "input_ids": padded("input_ids", PADDING),
        "labels": padded("labels", IGNORED),
        "attention_mask": torch.tensor(mask),
    }


def train(options: argparse.Namespace) -> None:
    """Train adapters, save them, and load them into the model that they are for."""
    samples = questions(256)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = PipelineTrainer(
        model=get_peft_model(small_llama(), config),
        args=TrainingArguments(
            output_dir=str(options.output),
            per_device_train_batch_size=16,
            per_device_eval_batch_size=32,
            gradient_accumulation_steps=2,
            max_steps=options.steps,
            learning_rate=1e-2,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
        ),
        data_collator=collate,
        train_dataset=samples[:-32],
        eval_dataset=samples[-32:],
        pipeline=PipelineArguments(microbatches=4),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(options.output / "adapters"))
    if trainer.is_world_process_zero():
        print(f"loss of answers {before:.4f} before, {after:.4f} after {trainer.state.global_step} steps")
        loaded = PeftModel.from_pretrained(small_llama(), str(options.output / "adapters"))
        print(f"loss of answers {_loss(loaded, collate(samples[-32:])):.4f} with the adapters that were saved")
    trainer.end()


@torch.no_grad()
def _loss(model: Any, batch: dict[str, Tensor]) -> float:
    return float(model.eval()(**batch).loss)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the adapters")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parsed())
