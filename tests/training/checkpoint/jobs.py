"""A training job with dropout and buffers that training updates, under any number of ranks and any schedule."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecut import Pipe, clip_grad_norm_, pipeline
from pipecut.run import PipelineSchedule, get_schedule_class

WIDTH, BLOCKS, BATCH, MICROBATCHES = 6, 12, 8, 4
CHUNKS = {"Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}


class Block(nn.Module):
    """A layer that draws random numbers, and keeps a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.tensor(0.9), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        if self.training:
            self.seen.mul_(0.5).add_(x.detach().mean(0))
        return x + self.dropout(torch.tanh(self.layer(x))) * self.scale


class Net(nn.Module):
    """Blocks in a row."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tied(nn.Module):
    """Blocks between two uses of one parameter."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def new_model(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(1)
    return kind()


@functools.cache
def cut(stages: int, kind: type[nn.Module] = Net) -> Pipe:
    return pipeline(new_model(kind), (torch.ones(BATCH // MICROBATCHES, WIDTH),), num_stages=stages)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


@dataclass
class Job:
    """A schedule with its optimizer and scheduler, and what its steps gave."""

    schedule: PipelineSchedule
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def train(self, first: int, last: int) -> None:
        """Train the steps from `first` up to `last`, that one left out."""
        indices = {stage.stage_index for stage in self.schedule.stages}
        for step in range(first, last):
            x, y = batch(step)
            self.optimizer.zero_grad()
            inputs = (x,) if 0 in indices else ()
            self.schedule.step(*inputs, target=y if self.schedule.plan.stages - 1 in indices else None)
            self.losses.append(self.schedule.mean_loss())
            self.norms.append(float(clip_grad_norm_(self.schedule, 0.5)))
            self.optimizer.step()
            self.scheduler.step()

    @property
    def state(self) -> dict[str, Any]:
        """All bits that training has changed, by name."""
        names = {id(parameter): name for name, parameter in self.schedule.named_parameters()}
        found = {name: value.clone() for name, value in self.schedule.state_dict().items()}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                found[f"{names[id(parameter)]}: {key}"] = value.clone() if isinstance(value, Tensor) else value
        found["lr"] = [group["lr"] for group in self.optimizer.param_groups]
        found["scheduler"] = self.scheduler.state_dict()
        found["generator"] = torch.get_rng_state()
        return found


def make_job(
    ranks: int,
    name: str = "1F1B",
    kind: type[nn.Module] = Net,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    timeout: float = 600.0,
    group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> Job:
    """Make a job of so many ranks, in one process; or this rank's part of it, if there is a process group.

    `group` has those ranks, the first of all, if they are not all.
    """
    chunks = CHUNKS.get(name, 1)
    pipe = cut(ranks * chunks, kind)
    schedule_class = get_schedule_class(name)
    torch.manual_seed(7)
    spread = ranks > 1 and dist.is_initialized()
    mine = [s for s in range(ranks * chunks) if not spread or s % ranks == dist.get_rank()]
    # With memory of their own: jobs of one test share a trace and a model.
    held = new_model(kind).state_dict()
    stages = [pipe.build_stage(index, "cpu", group, checkpoint=held) for index in mine]
    torch.manual_seed(7)
    given: Any = stages if chunks > 1 or not spread else stages[0]
    options: dict[str, Any] = {} if spread or chunks == 1 else {"ranks": ranks}
    schedule = schedule_class(given, MICROBATCHES, nn.functional.mse_loss, timeout=timeout, **options)
    made = optimizer(schedule.parameters(), lr=0.05, **settings)  # type: ignore[call-arg]
    return Job(schedule, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 10))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Every bit is the same."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, f"{name}: {value} and {other[name]}"


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all ranks; what several hold is the same on each."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            same = torch.equal(value, found[name]) if name in found and isinstance(value, Tensor) else True
            assert same, name
            found[name] = value
    return found
