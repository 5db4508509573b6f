"""A job of two ranks that saves every two steps and goes on from the last checkpoint, to be killed at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from pipecut import latest_checkpoint, load_checkpoint, save_checkpoint
from tests.training.checkpoint.jobs import make_job

STEPS = 40
RANKS = 2


def work(rank: int, folder: str, store: str, log: str) -> None:
    """Play one rank until the job is done. Rank 0 writes down what happens, line by line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    job = make_job(RANKS)
    start = 0
    if latest_checkpoint(folder) is not None:
        start = load_checkpoint(folder, job.schedule, job.optimizer, scheduler=job.scheduler).step
    note(rank, log, f"resumed {start}")
    for step in range(start, STEPS):
        job.train(step, step + 1)
        note(rank, log, f"loss {step} {job.losses[-1].hex()}")
        if (step + 1) % 2 == 0:
            beside = (step + 1) % 4 == 0  # every other save is written beside the steps
            save = save_checkpoint(
                folder, job.schedule, job.optimizer, step=step + 1, scheduler=job.scheduler, asynchronous=beside
            )
            if not beside:
                note(rank, log, f"saved {step + 1}")  # and with it the one before
            elif step + 1 == STEPS:
                save.wait()
    torch.save(job.state, Path(log).with_suffix(f".{rank}.pt"))
    note(rank, log, "done")
    dist.destroy_process_group()


def note(rank: int, log: str, text: str) -> None:
    if rank == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{text}\n".encode())
        os.close(file)
