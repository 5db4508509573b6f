"""Training in float16 with a gradient scaler, cut and uncut, and functions of ranks that do so."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipecut import GradScaler, Pipe, Schedule1F1B, SplitPoint, clip_grad_norm_, pipeline
from tests.training.norm_cases import error_of

WIDTH, MICROBATCHES = 8, 2
X, Y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def half() -> Iterator[None]:
    with torch.autocast("cpu", torch.float16):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def cut(model: nn.Module) -> Pipe:
    with half():
        return pipeline(model, (X,), split_spec={"last": SplitPoint.BEGINNING})


def scheduled(model: nn.Module, rank: int | None = None, **options: Any) -> Schedule1F1B:
    pipe = cut(model)
    stages = [pipe.build_stage(index, "cpu") for index in (range(2) if rank is None else [rank])]
    return Schedule1F1B(stages if rank is None else stages[0], MICROBATCHES, loss_fn, **options)


def step(schedule: Schedule1F1B, rank: int | None = None) -> float:
    with half():
        schedule.step(*((X,) if rank in (None, 0) else ()), **({"target": Y} if rank in (None, 1) else {}))
    return schedule.mean_loss()


class Uncut:
    """The uncut model with torch's own scaler, microbatch by microbatch."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.scaler = torch.amp.GradScaler("cpu", **options)

    def step(self) -> float:
        loss = 0.0
        for x, y in zip(X.chunk(MICROBATCHES), Y.chunk(MICROBATCHES), strict=True):
            with half():
                part = loss_fn(self.model(x), y)
            self.scaler.scale(part / MICROBATCHES).backward()  # type: ignore[union-attr]
            loss += part.item() / MICROBATCHES
        return loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trains_as_uncut(rank: int | None, *, clips: bool, fused: bool) -> list[float]:
    """Six steps, of which the third overflows in the last stage; bits of the uncut model with torch's scaler."""
    torch.manual_seed(0)
    model, options = Net(), {"init_scale": 2.0**12, "growth_interval": 2}
    uncut, schedule = Uncut(model, **options), scheduled(model, rank)
    scaler = GradScaler(schedule, **options)  # type: ignore[arg-type]
    make = (lambda parameters: torch.optim.AdamW(parameters, fused=True)) if fused else sgd
    optimizer, theirs = make(schedule.parameters()), make(uncut.model.parameters())
    scales = []
    for number in range(6):
        loss, expected = step(schedule, rank), uncut.step()
        assert loss == expected  # not scaled
        if number == 2:
            for each in (uncut.model, *(stage.submod for stage in schedule.stages if stage.is_last)):
                each.get_parameter("last.2.bias").grad.fill_(math.inf)  # type: ignore[union-attr]
        if clips:
            scaler.unscale_(optimizer)
            uncut.scaler.unscale_(theirs)
            norm = clip_grad_norm_(schedule, 0.5)
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(uncut.model.parameters(), 0.5))
        for each, used in ((scaler, optimizer), (uncut.scaler, theirs)):
            each.step(used)
            each.update()
            used.zero_grad()
        assert scaler.get_scale() == uncut.scaler.get_scale()
        wanted = dict(uncut.model.named_parameters())
        for name, parameter in schedule.named_parameters():
            assert torch.equal(parameter, wanted[name]), f"{name} in step {number}"
        scales.append(scaler.get_scale())
    assert scaler.state_dict() == uncut.scaler.state_dict()
    return scales


def has_nothing_to_train(rank: int) -> float:
    model = Net()
    model.first.requires_grad_(False)
    schedule = scheduled(model, rank)
    scaler = GradScaler(schedule)
    optimizer = sgd(schedule.parameters()) if rank else None
    step(schedule, rank)
    if rank:
        model.last[0].bias.grad.fill_(math.nan)  # type: ignore[union-attr,operator]
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def has_another_scale(rank: int) -> None:
    schedule = scheduled(Net(), rank)
    scaler = GradScaler(schedule, init_scale=2.0 ** (8 + rank))
    step(schedule, rank)
    scaler.step(sgd(schedule.parameters()))


def has_no_autocast_on_one(rank: int) -> None:
    schedule = scheduled(Net(), rank)
    GradScaler(schedule)
    if rank == 0:
        step(schedule, rank)
    else:
        schedule.step(target=Y)


def fails_on_one(rank: int) -> str:
    """Gradients in float16 on one rank: torch refuses them there, and every rank raises."""
    schedule = scheduled(Net(), rank)
    scaler = GradScaler(schedule)
    step(schedule, rank)
    parameters = list(schedule.parameters())
    if rank == 1:
        parameters = [nn.Parameter(torch.ones(2, dtype=torch.float16))]
        parameters[0].grad = torch.ones(2, dtype=torch.float16)
    return error_of(lambda: scaler.step(sgd(parameters)))


def leaves_an_optimizer_scaled(rank: int) -> str:
    """One rank has two optimizers, and one of them was not unscaled."""
    schedule = scheduled(Net(), rank)
    scaler = GradScaler(schedule)
    step(schedule, rank)
    scaler.unscale_(sgd([each for name, each in schedule.named_parameters() if rank == 0 or "weight" in name]))
    return error_of(lambda: clip_grad_norm_(schedule, 1.0))


def overflows_in_one_part(number: int, kind: str, who: int) -> tuple[float, bool]:
    """Two pipelines of two ranks over shards or parts of the same stages, of which one has an infinity."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "pp"))
    rank = number % 2
    stage = cut(Net()).build_stage(rank, "cpu", mesh["pp"].get_group())
    if kind == "fully_shard":
        fully_shard(stage.submod, mesh=mesh["other"])
    else:
        part = stage.submod.get_submodule(("first", "last")[rank])
        parallelize_module(part, mesh["other"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    scaler, optimizer = GradScaler(schedule), sgd(schedule.parameters())
    before = [parameter.detach().clone() for parameter in schedule.parameters()]
    results = []
    for overflow in (True, False):
        step(schedule, rank)
        if overflow and number == who:
            grad: Any = next(schedule.parameters()).grad
            grad.to_local().view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [parameter.detach() for parameter in schedule.parameters()]
        results.append(all(torch.equal(*map(local, pair)) for pair in zip(before, after, strict=True)))
    assert results == [True, False]
    return scaler.get_scale(), results[0]


def local(tensor: Any) -> Tensor:
    return tensor.to_local()  # type: ignore[no-any-return]
