"""Parts that ranks play in tests of checkpoints: each returns what the test compares."""

from __future__ import annotations

import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipecut import CheckpointError, Schedule1F1B, export_safetensors, load_checkpoint, save_checkpoint
from pipecut.errors import DisagreementError
from pipecut.training.checkpoint.ranks import Ranks
from tests.training.checkpoint.jobs import BATCH, MICROBATCHES, Job, Net, cut, make_job, new_model


class Position:
    """A place in the data, which the test can read."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def results(job: Job) -> tuple[list[float], dict[str, Any]]:
    return job.losses, job.state


def save_here(rank: int, folder: str, name: str, kind: type[nn.Module] = Net) -> tuple[list[float], dict[str, Any]]:
    """Train 3 steps on these ranks, and save."""
    job = make_job(dist.get_world_size(), name, kind)
    job.train(0, 3)
    extra = {"data": Position(30), "rank": rank}
    save_checkpoint(folder, job.schedule, job.optimizer, step=3, scheduler=job.scheduler, extra=extra)
    return results(job)


def go_on_here(rank: int, folder: str, name: str, kind: type[nn.Module] = Net) -> Any:
    """Load on these ranks, and train 3 more steps."""
    job = make_job(dist.get_world_size(), name, kind)
    torch.manual_seed(99)
    data = Position(0)
    loaded = load_checkpoint(folder, job.schedule, job.optimizer, scheduler=job.scheduler, extra={"data": data})
    job.train(3, 6)
    return *results(job), loaded.step, data.place, loaded.extra["rank"]


def train_here(rank: int, name: str, kind: type[nn.Module] = Net) -> tuple[list[float], dict[str, Any]]:
    job = make_job(dist.get_world_size(), name, kind)
    job.train(0, 6)
    return results(job)


def job_of_first_ranks(rank: int, count: int, name: str, folder: str, *, loads: bool) -> Any:
    """Train 3 steps on the first ranks and save; or load on them, and train 3 more. The others do nothing."""
    if rank >= count:
        return None
    group = dist.new_group([*range(count)], use_local_synchronization=True)
    job = make_job(count, name, group=group)
    if loads:
        torch.manual_seed(99)
        load_checkpoint(folder, job.schedule, job.optimizer, scheduler=job.scheduler, group=group)
    job.train(*((3, 6) if loads else (0, 3)))
    if not loads:
        save_checkpoint(folder, job.schedule, job.optimizer, step=3, scheduler=job.scheduler, group=group)
    return job.losses, job.norms, job.state


def hybrid_job(wrapper: str) -> Job:
    """Make a job of 2 pipelines of 2 ranks, or on 2 ranks 2 pipelines of one: stages are copied or sharded."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "pp"))
    pp = mesh["pp"].get_group()
    index = dist.get_rank(pp)
    stage = cut(world // 2).build_stage(index, "cpu", group=pp, checkpoint=new_model().state_dict())
    torch.manual_seed(7)
    if wrapper == "ddp":
        stage.submod = DistributedDataParallel(stage.submod, process_group=mesh["dp"].get_group())
    else:
        fully_shard(stage.submod, mesh=mesh["dp"])
    schedule = Schedule1F1B(stage, MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(schedule.parameters(), lr=0.05)
    return Job(schedule, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))


def save_hybrid(rank: int, folder: str, wrapper: str) -> dict[str, Any]:
    job = hybrid_job(wrapper)
    job.train(0, 3)
    save_checkpoint(folder, job.schedule, job.optimizer, step=3, scheduler=job.scheduler, extra={"rank": rank})
    return whole(job.state)


def load_hybrid(rank: int, folder: str, wrapper: str) -> dict[str, Any]:
    job = hybrid_job(wrapper)
    load_checkpoint(folder, job.schedule, job.optimizer, scheduler=job.scheduler)
    return whole(job.state)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The same with DTensors put together."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def two_optimizers(ranks: int) -> tuple[Job, list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LambdaLR]]:
    """Make a job with one optimizer over weights, and another over biases whose rate depends on the block."""
    job = make_job(ranks)
    named = dict(job.schedule.named_parameters())
    weights = [value for name, value in named.items() if name.endswith("weight")]
    groups: dict[float, list[nn.Parameter]] = {}
    for name, value in named.items():
        if name.endswith("bias"):
            groups.setdefault(0.1 if int(name.split(".")[1]) < 6 else 0.2, []).append(value)
    first = torch.optim.SGD(weights, lr=0.3)
    second = torch.optim.SGD([{"params": params, "lr": rate} for rate, params in groups.items()])
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in (first, second)]
    return job, [first, second], schedulers


def save_two_optimizers(rank: int, folder: str) -> None:
    job, optimizers, (of_first, of_second) = two_optimizers(2)
    for each in (*optimizers, of_first, of_second):
        each.step()
    save_checkpoint(
        folder, job.schedule, optimizers, step=1, scheduler=of_second, extra={"of\\first's": of_first, "a\nb": 1}
    )


def milestones_job(ranks: int, milestones: list[int]) -> tuple[Job, torch.optim.lr_scheduler.SequentialLR]:
    """Make a job with one parameter group for each half of the blocks, and a scheduler with as many milestones."""
    job = make_job(ranks)
    groups: dict[bool, list[nn.Parameter]] = {}
    for name, value in job.schedule.named_parameters():
        groups.setdefault(int(name.split(".")[1]) < 6, []).append(value)
    rates = {True: 0.1, False: 0.2}
    job.optimizer = torch.optim.SGD([{"params": groups[first], "lr": rates[first]} for first in groups])
    parts = [torch.optim.lr_scheduler.ConstantLR(job.optimizer, 0.5, total_iters=4) for _ in range(3)]
    return job, torch.optim.lr_scheduler.SequentialLR(job.optimizer, parts, milestones)


def save_milestones(rank: int, folder: str) -> None:
    job, scheduler = milestones_job(2, milestones=[5, 10])
    save_checkpoint(folder, job.schedule, job.optimizer, step=0, scheduler=scheduler)


def stay_away(rank: int, folder: str, timeout: float) -> None:
    """One rank does not come to the checkpoint."""
    job = make_job(2, timeout=timeout)
    if rank == 0:
        save_checkpoint(folder, job.schedule, job.optimizer, step=1)


def lose_each_other(rank: int) -> list[str]:
    """One rank comes too late to a gather, and both go on; then they make different calls."""
    told = []
    for calls, late in ((("save_checkpoint",) * 2, True), (("save_checkpoint", "load_checkpoint"), False)):
        group = dist.new_group([0, 1], backend="gloo")
        ranks = Ranks(group, rank, 2, timedelta(seconds=0.2 if late else 60), calls[rank])
        if late and rank == 1:
            dist.barrier()
        for _ in range(2):
            try:
                ranks.gather(f"of rank {rank}")
                told.append("gathered")
            except (CheckpointError, DisagreementError) as error:
                told.append(str(error))
        if late and rank == 0:
            dist.barrier()
    return told


def disagree(rank: int, folder: str, what: str) -> None:
    """Ask for something else on each rank."""
    job = make_job(2)
    own = Path(folder) / (f"of rank {rank}" if what == "folder" else "all")
    if what == "load":
        for number in range(2):
            save_checkpoint(own, job.schedule, step=number)
        load_checkpoint(own / f"step-0000000{rank}", job.schedule)
    save_checkpoint(own, job.schedule, job.optimizer, step=rank if what == "step" else 3)


def fail_on_one(rank: int, folder: str, what: str) -> None:
    """One rank has something that cannot be saved."""
    job = make_job(2)
    save_checkpoint(folder, job.schedule, job.optimizer, step=1)
    wrong: dict[str, Any] = {"step": -2} if what == "step" else {"step": 2, "extra": {"clock": print}}
    save_checkpoint(folder, job.schedule, job.optimizer, **(wrong if rank else {"step": 2}))


def different_settings(rank: int, folder: str, kind: type[nn.Module]) -> None:
    """A tied parameter has another learning rate on each rank."""
    job = make_job(2, kind=kind)
    job.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    save_checkpoint(folder, job.schedule, job.optimizer, step=1)


def two_models(rank: int, folder: str) -> None:
    """Two pipelines that are no copies of each other save as if they were one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = cut(2).build_stage(rank % 2, "cpu", group=groups[rank // 2])
    schedule = Schedule1F1B(stage, MICROBATCHES, nn.functional.mse_loss)
    x = torch.ones(BATCH, 6)
    schedule.step(*((x,) if rank % 2 == 0 else ()), target=x if rank % 2 else None)
    own = f"{folder}/{rank // 2}"
    save_checkpoint(own, schedule, step=1, group=groups[rank // 2])
    save_checkpoint(folder, schedule, step=1)


def fill_the_disk_of_one(rank: int, folder: str, asynchronous: bool) -> str:
    """One rank cannot write more than some bytes; returns the error of the save, after which another one works."""
    job = make_job(2)
    job.train(0, 1)
    save_checkpoint(folder, job.schedule, job.optimizer, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        save_checkpoint(folder, job.schedule, job.optimizer, step=2, asynchronous=asynchronous).wait()
        text = "saved"
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save_checkpoint(folder, job.schedule, job.optimizer, step=3)
    return text


def save_beside(rank: int, folder: str) -> Any:
    """Save while the next steps run, twice."""
    job = make_job(2)
    job.train(0, 2)
    then = job.state
    first = save_checkpoint(folder, job.schedule, job.optimizer, step=2, asynchronous=True)
    job.train(2, 4)
    second = save_checkpoint(folder, job.schedule, job.optimizer, step=4, asynchronous=True)
    assert first.done()
    job.train(4, 5)
    return str(first.path), str(second.wait()), then


def export_hybrid(rank: int, folder: str, wrapper: str) -> dict[str, Any]:
    job = hybrid_job(wrapper)
    job.train(0, 1)
    export_safetensors(folder, job.schedule)
    return whole(job.state)
