"""Functions of ranks that take norms: copies and shards of stages, and calls that differ between ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pipecut import Schedule1F1B, clip_grad_norm_, get_total_norm, pipeline
from tests.support.training import assert_same_gradients, gradients_of

WITHIN = 2e-6  # float32, and sums in another order


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.rand(1) + 0.5)  # of which most shards are empty

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Language(nn.Module):
    """Blocks between the two uses of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_fn(output: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten(), reduction="mean")


def wrapped(module: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    if kind == "DDP":
        return DistributedDataParallel(module, process_group=mesh.get_group())
    if kind == "fully_shard":
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    for block in module.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


def clips_under(number: int, kind: str, norm_type: float) -> float:
    """Two pipelines of two ranks: copies, shards or tensor-parallel parts of the same stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "pp"))
    other, rank = divmod(number, 2)
    model = Language()
    whole = copy.deepcopy(model)
    batch = torch.randint(11, (8, 3))
    tokens = batch if kind == "TP" else batch.chunk(2)[other]
    pipe = pipeline(model, (tokens,), split_spec={"blocks.1": _beginning()})
    stage = pipe.build_stage(rank, "cpu", mesh["pp"].get_group())
    stage.submod = wrapped(stage.submod, kind, mesh["other"])
    schedule = Schedule1F1B(stage, 2, loss_fn)
    schedule.step(*((tokens,) if rank == 0 else ()), **({"target": tokens} if rank else {}))
    loss_fn(whole(batch), batch).backward()
    norm = clip_grad_norm_(schedule, 0.05, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05, norm_type)
    assert type(norm) is Tensor
    assert torch.allclose(norm, expected, rtol=WITHIN, atol=0), f"{norm.item()} and {expected.item()}"
    wanted = gradients_of(whole)
    for name, parameter in schedule.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert_same_gradients({name: grad}, {name: wanted[name]}, 1e-5)
    return norm.item()


def parted(number: int, kind: str) -> Schedule1F1B:
    """Return one rank's schedule of two pipelines over shards or parts of the same stages, after a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "pp"))
    rank, model, tokens = number % 2, Language(), torch.randint(11, (8, 3))
    pipe = pipeline(model, (tokens,), split_spec={"blocks.1": _beginning()})
    stage = pipe.build_stage(rank, "cpu", mesh["pp"].get_group())
    stage.submod = wrapped(stage.submod, kind, mesh["other"])
    schedule = Schedule1F1B(stage, 2, loss_fn)
    schedule.step(*((tokens,) if rank == 0 else ()), **({"target": tokens} if rank else {}))
    return schedule


def fails_on_one_part(number: int, kind: str) -> tuple[str, str, float]:
    """One rank names no parameter, then leaves one out, while its partner would reduce norms with it."""
    schedule = parted(number, kind)
    wrong = error_of(lambda: clip_grad_norm_(schedule, 1.0, parameters="no" if number == 3 else None))
    most = [each for name, each in schedule.named_parameters() if "up.weight" not in name]
    fewer = most if number == 3 else None
    other = error_of(lambda: clip_grad_norm_(schedule, 1.0, parameters=fewer))
    clip_grad_norm_(schedule, 1.0)
    return wrong, other, get_total_norm(schedule).item()


def _beginning() -> Any:
    from pipecut import SplitPoint

    return SplitPoint.BEGINNING


# Calls that differ between the ranks of one pipeline.


def ready(rank: int, **options: Any) -> tuple[Schedule1F1B, Language]:
    model = Language()
    tokens = torch.randint(11, (8, 3))
    pipe = pipeline(model, (tokens,), split_spec={"blocks.1": _beginning()})
    schedule = Schedule1F1B(pipe.build_stage(rank, "cpu"), 2, loss_fn, **options)
    schedule.step(*((tokens,) if rank == 0 else ()), **({"target": tokens} if rank else {}))
    return schedule, model


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the text says which
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def passes_other_options(rank: int) -> None:
    schedule, _ = ready(rank)
    clip_grad_norm_(schedule, 1.0 + rank)


def names_no_parameter(rank: int) -> float:
    """The error of one rank is one on all; the next call works."""
    schedule, _ = ready(rank)
    chosen = ["blocks.1.scale"] if rank == 0 else [torch.ones(2)]
    told = error_of(lambda: clip_grad_norm_(schedule, 1.0, parameters=chosen))
    assert told.startswith("StepError: the step failed: rank 1 failed in clip_grad_norm_(): ")
    assert "parameters= has a float32[2] that no stage of this rank holds" in told
    clip_grad_norm_(schedule, 1.0)
    return get_total_norm(schedule).item()


def leaves_a_holder_out(rank: int) -> None:
    schedule, model = ready(rank)
    clip_grad_norm_(schedule, 1.0, parameters=[model.embed.weight] if rank == 0 else [model.blocks[1].scale])


def has_a_stage_without_gradients(rank: int) -> float:
    schedule, model = ready(rank)
    for name, parameter in model.named_parameters():
        if rank == 0 and name != "embed.weight":
            parameter.grad = None
    norm = get_total_norm(schedule)
    model.zero_grad()
    told = error_of(lambda: get_total_norm(schedule))
    assert "no parameter of the pipeline has a gradient: call get_total_norm() after schedule.step()" in told
    return norm.item()


def names_of_all_ranks(rank: int) -> list[float]:
    """A rank may name parameters of others; one that an adapter adds on one rank is known to all."""
    schedule, model = ready(rank)
    named = get_total_norm(schedule, parameters=["blocks.0.scale", "blocks.1.scale", "head.weight"])
    if rank == 1:
        block: Any = schedule.stages[0].submod.get_submodule("blocks.1")
        block.added = nn.Parameter(torch.ones(3))
        block.added.grad = torch.ones(3)
    return [named.item(), get_total_norm(schedule, parameters="blocks.1.added").item(), get_total_norm(schedule).item()]


def stays_away(rank: int, who: int, timeout: float) -> None:
    schedule, _ = ready(rank, timeout=timeout)
    if rank == who:
        time.sleep(timeout)
        return
    clip_grad_norm_(schedule, 1.0)


def steps_instead(rank: int, who: int) -> None:
    schedule, _ = ready(rank)
    if rank == who:
        tokens = torch.randint(11, (8, 3))
        schedule.step(*((tokens,) if rank == 0 else ()), **({"target": tokens} if rank else {}))
    else:
        clip_grad_norm_(schedule, 1.0)
