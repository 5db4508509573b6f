"""Trains a small Llama on the bytes of a text file with PipelineTrainer, a stage on each rank.

torchrun --nproc-per-node=2 examples/trainer.py --output out
torchrun --nproc-per-node=3 examples/trainer.py --output out --steps 80 --resume    # goes on, with three stages
python examples/trainer.py --output out --steps 100 --resume                        # and without a pipeline
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator
from transformers.trainer_utils import get_last_checkpoint

import pipecut
from pipecut.integrations.transformers import PipelineArguments, PipelineTrainer

TEXT = Path(__file__).resolve().parent.parent / "README.md"
LENGTH = 64  # bytes of a sample


def small_llama(layers: int = 4) -> LlamaForCausalLM:
    """Return a model over bytes, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def samples_of(text: bytes) -> list[dict[str, list[int]]]:
    """Cut a text into samples; a model for language shifts the labels itself."""
    parts = [list(text[start : start + LENGTH]) for start in range(0, len(text) - LENGTH, LENGTH)]
    return [{"input_ids": part, "attention_mask": [1] * LENGTH, "labels": part} for part in parts]


def train(options: argparse.Namespace) -> None:
    """Train, evaluate, save, and let the model write a few bytes."""
    options.output.mkdir(parents=True, exist_ok=True)
    samples = samples_of(options.text.read_bytes())
    trainer = PipelineTrainer(
        model=small_llama(),
        args=TrainingArguments(
            output_dir=str(options.output),
            per_device_train_batch_size=16,
            max_steps=options.steps,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            max_grad_norm=1.0,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            save_total_limit=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
        ),
        data_collator=default_data_collator,
        train_dataset=samples[:-16],
        eval_dataset=samples[-16:],
        pipeline=PipelineArguments(schedule=options.schedule, microbatches=4),
    )
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by torchrun --max-restarts
    last = get_last_checkpoint(options.output) if options.resume or is_restarted else None
    trainer.train(resume_from_checkpoint=last)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(options.output / "model"))  # a folder for LlamaForCausalLM.from_pretrained()
    if trainer.is_world_process_zero():
        print(f"perplexity {math.exp(loss):.2f} after {trainer.state.global_step} steps")
        print(repr(_continued(trainer.model, b"The model ")))
    trainer.end()


def _continued(model: Any, text: bytes) -> bytes:
    """Let the whole model go on with a text: after training every rank has all weights."""
    ids = torch.tensor([list(text)], device=model.device)
    made = model.eval().generate(ids, max_new_tokens=24, do_sample=False, use_cache=False, pad_token_id=0)
    return bytes(made[0].tolist())


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of checkpoints and of the model")
    parser.add_argument("--text", type=Path, default=TEXT, help="the file to train on")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--schedule", default="1F1B", help="1F1B, GPipe, ZB-H1, Interleaved1F1B, ...")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if "RANK" in os.environ:
        pipecut.init_process_group()  # with `torchrun --max-restarts` a job that is started again joins, too
    train(parsed())
