"""Trains a small Llama on a text file, byte by byte, over the ranks that torchrun starts.

    torchrun --nproc-per-node 2 examples/train_lm.py --steps 40
    torchrun --nproc-per-node 4 examples/train_lm.py --steps 80 --resume  # goes on, on another number of stages
    torchrun --nproc-per-node 4 examples/train_lm.py --steps 80 --resume --export out/model  # for from_pretrained()

Every rank runs this script. With `torchrun --max-restarts 3` a job that loses a rank goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import LlamaConfig, LlamaForCausalLM

import pipecut
from pipecut import PlannedSchedule as Schedule
from pipecut.schedule import Plan, plan_for, schedule_names
from pipecut.training import Progress

BATCH, LENGTH, MICROBATCHES = 16, 64, 8
EVALUATED = 4  # batches of text that is not trained on


class Text:
    """Batches of a text as bytes; which one a step trains on follows from its number, on every rank alike."""

    def __init__(self, path: Path, device: torch.device) -> None:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long().to(device)
        self.train, self.held_out = data.split([len(data) * 9 // 10, len(data) - len(data) * 9 // 10])

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the batch of a training step."""
        return _draw(self.train, seed=step)

    def evaluation(self) -> list[dict[str, Tensor]]:
        """Return the batches of an evaluation, the same every time."""
        return [_draw(self.held_out, seed) for seed in range(EVALUATED)]


def _draw(data: Tensor, seed: int) -> dict[str, Tensor]:
    begins = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    ids = data[begins + torch.arange(LENGTH)]
    return {"input_ids": ids, "labels": ids}  # the model shifts the labels itself


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the plan of the schedule that was asked for, for the ranks that torchrun has started."""
    ranks, stages = dist.get_world_size(), options.stages
    if stages and stages % ranks:
        sys.exit(f"{stages} stages cannot run on {ranks} ranks: start torchrun with --nproc-per-node {stages}")
    try:
        return plan_for(options.schedule, ranks=ranks, microbatches=MICROBATCHES, chunks=stages and stages // ranks)
    except pipecut.PlanError as error:
        more = f" Or start torchrun with --nproc-per-node {stages}, a rank for each stage." if stages else ""
        sys.exit(f"--schedule {options.schedule} on {ranks} ranks: {error}{more}")


def make_schedule(plan: Plan, device: torch.device) -> Schedule:
    """Cut the model, and return the schedule that trains the stages of this rank."""
    torch.manual_seed(0)  # the same model on every rank; each keeps its own stages
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes)
    example = {name: torch.zeros(2, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    pipe = pipecut.pipeline(LlamaForCausalLM(config), (), example, num_stages=plan.stages)
    own = plan.placement.stages_of[dist.get_rank()]
    return Schedule([pipe.build_stage(stage, device) for stage in own], plan)


def perplexity(schedule: Schedule, text: Text) -> float:
    """Return the perplexity of the text that is not trained on."""
    for stage in schedule.stages:
        stage.submod.eval()
    total = 0.0
    for batch in text.evaluation():
        schedule.eval(**batch, return_outputs=False)
        total += schedule.mean_loss()
    for stage in schedule.stages:
        stage.submod.train()
    return math.exp(total / EVALUATED)


def steps_before(options: argparse.Namespace, schedule: Schedule, optimizer: Optimizer, scheduler: LRScheduler) -> int:
    """Return the number of steps that were run before, and let the job go on from there."""
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if pipecut.latest_checkpoint(options.folder) is None:
        return 0
    if not options.resume and not is_restarted:
        sys.exit(f"{options.folder} has checkpoints: pass --resume to go on from the last, or another --folder")
    return pipecut.load_checkpoint(options.folder, schedule, optimizer, scheduler=scheduler).step


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train, evaluate and save, on this rank."""
    text = Text(options.text, device)
    schedule = make_schedule(make_plan(options), device)
    optimizer = AdamW(schedule.parameters(), lr=options.lr)
    scheduler = LambdaLR(optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / options.steps))
    start = steps_before(options, schedule, optimizer, scheduler)
    with Progress(options.steps, schedule, file=options.folder / "metrics.jsonl", start=start) as progress:
        for step in range(start + 1, options.steps + 1):
            optimizer.zero_grad()
            schedule.step(**text.batch(step), return_outputs=False)  # the first rank's arguments are used
            norm = pipecut.clip_grad_norm_(schedule, max_norm=1.0)
            optimizer.step()
            progress.update(norm=norm, lr=scheduler.get_last_lr()[0])
            scheduler.step()
            if step % options.save_every == 0 or step == options.steps:
                progress.log(perplexity=perplexity(schedule, text))
                pipecut.save_checkpoint(options.folder, schedule, optimizer, step=step, scheduler=scheduler)
    if options.export is not None:
        pipecut.export_safetensors(options.export, schedule)  # with the model's config


def main() -> None:
    """Read the options, and join the ranks that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__).with_suffix(".txt"), help="file to train on")
    parser.add_argument("--steps", type=int, default=200, help="steps in all, with those before (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest rate of learning (default: %(default)s)")
    parser.add_argument("--schedule", default="1F1B", help=f"one of {', '.join(schedule_names())}")
    parser.add_argument("--stages", type=int, help="stages in all (default: as many as the schedule needs)")
    parser.add_argument("--folder", type=Path, default=Path("out/train_lm"), help="for checkpoints and metrics.jsonl")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the trained model for from_pretrained()")
    options = parser.parse_args()
    try:
        device = pipecut.init_process_group()  # and not torch's: a job that torchrun starts again joins, too
    except pipecut.InputError as error:
        sys.exit(str(error))
    options.folder.mkdir(parents=True, exist_ok=True)
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
