"""Trains a small GPT in pipelines whose stages are sharded: dp x pp x fsdp, and tensor-parallel layers if asked for.

torchrun --nproc-per-node 4 examples/hybrid.py                  # 2 pipelines of 2 ranks, which share shards
torchrun --nproc-per-node 4 examples/hybrid.py --dp 2 --fsdp 1  # 2 pipelines with a copy each
torchrun --nproc-per-node 4 examples/hybrid.py --fsdp 1 --tp 2  # one pipeline, its layers divided by 2 ranks
torchrun --nproc-per-node 2 examples/hybrid.py --fsdp 1 --resume  # goes on with the last checkpoint, on 2 ranks
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, next_token_loss, random_tokens
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipecut

CONFIG = GPTConfig(vocabulary=64, context=16, layers=4, width=32, tied_embeddings=True)
BATCH, MICROBATCHES = 16, 4  # samples of all pipelines together; microbatches of each


def read_arguments() -> argparse.Namespace:
    """Return the sizes of the mesh, and what to train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pp", type=int, default=2, help="ranks in a pipeline")
    parser.add_argument("--dp", type=int, default=1, help="groups of pipelines that hold copies")
    parser.add_argument("--fsdp", type=int, default=-1, help="pipelines that share shards; -1: as ranks are left")
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide the layers of a stage")
    parser.add_argument("--schedule", default="1F1B", help="its name, such as 1F1B or ZBVZeroBubble")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("out/hybrid"), help="of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the last checkpoint")
    return parser.parse_args()


def wrap(module: Any, mesh: pipecut.TrainingMesh) -> None:
    """Divide the layers of a stage first, then shard them, block by block, and last what is left."""
    for block in module.layers:
        if mesh.size("tp") > 1:
            plan = {"feed_forward.up": ColwiseParallel(), "feed_forward.down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp", "fsdp"])
    fully_shard(module, mesh=mesh["dp", "fsdp"])


def make_schedule(name: str, mesh: pipecut.TrainingMesh) -> tuple[Any, pipecut.Pipe]:
    """Cut the model, build and wrap the stages of this rank, and only then make the schedule."""
    torch.manual_seed(0)  # the same weights on all ranks
    chunks = len(mesh.stages(name))
    pipe = pipecut.pipeline(GPT(CONFIG), (random_tokens(CONFIG, 2),), num_stages=chunks * mesh.size("pp"))
    stages = [pipe.build_stage(index, mesh.device, group=mesh.pp_group) for index in mesh.stages(name)]
    for stage in stages:
        wrap(stage.submod, mesh)
    schedule: Any = pipecut.get_schedule_class(name)
    return schedule(stages, MICROBATCHES, next_token_loss), pipe


def train_step(schedule: Any, tokens: torch.Tensor) -> None:
    """Give the inputs to the rank of the first stage, and the target to that of the last."""
    inputs = (tokens,) if any(stage.is_first for stage in schedule.stages) else ()
    target = tokens if any(stage.is_last for stage in schedule.stages) else None
    schedule.step(*inputs, target=target, return_outputs=False)


def train(arguments: argparse.Namespace) -> None:
    """Train on this rank."""
    mesh = pipecut.device_mesh(pp=arguments.pp, dp=arguments.dp, fsdp=arguments.fsdp, tp=arguments.tp)
    first = dist.get_rank() == 0
    if first:
        print(mesh)
    schedule, _pipe = make_schedule(arguments.schedule, mesh)  # a pipe that is kept can trace calls of other forms
    optimizer = torch.optim.AdamW(schedule.parameters(), lr=1e-2)
    begin = 0
    if arguments.resume:
        begin = pipecut.load_checkpoint(arguments.folder, schedule, optimizer).step
    for step in range(begin, arguments.steps):
        tokens = random_tokens(CONFIG, BATCH, seed=step).chunk(mesh.data_size)[mesh.data_rank]
        train_step(schedule, tokens)
        norm = pipecut.clip_grad_norm_(schedule, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step}: loss {schedule.mean_loss():.6f}, norm of the gradients {norm.item():.6f}", flush=True)
        if (step + 1) % arguments.save_every == 0:
            pipecut.save_checkpoint(arguments.folder, schedule, optimizer, step=step + 1)


def main() -> None:
    """Join the process group that torchrun has prepared, and train."""
    pipecut.init_process_group()
    try:
        train(read_arguments())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
