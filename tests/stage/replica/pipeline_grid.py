"""Two pipelines of two ranks, each with half of the batch, beside one process with the whole model and batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pipecut import PipelineStage, PlannedSchedule, get_schedule_class
from pipecut.schedule import Plan, plan_for

REPLICAS, PIPELINE = 2, 2
MICROBATCHES, SAMPLES = 4, 6  # of each replica: microbatches of 2, 2, 1 and 1 samples
SINGLE = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


class Block(nn.Module):
    """Layers whose weight gradients are put off in a split backward, if they are 400 wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Part(nn.Module):
    """The model of one stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def plan_of(name: str, microbatches: int = MICROBATCHES) -> Plan:
    """The plan of a schedule on two ranks, with two stages on each if the schedule takes several."""
    return plan_for(name, ranks=PIPELINE, chunks=1 if name in SINGLE else 2, microbatches=microbatches)


class Grid:
    """This process's place in the grid: its stages and its data; and the whole of both, in one model."""

    def __init__(
        self,
        number: int,
        schedule: str | Plan,
        wrap: Wrap,
        *,
        parts: Callable[[int], nn.Module] = Part,
        width: int = 8,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        self.mesh = init_device_mesh("cpu", (REPLICAS, PIPELINE), mesh_dim_names=("dp", "pp"))
        self.replica, self.rank = divmod(number, PIPELINE)
        plan = plan_of(schedule) if isinstance(schedule, str) else schedule
        places = plan.placement
        self.is_first, self.is_last = (places.rank_of[stage] == self.rank for stage in (0, plan.stages - 1))
        self.width, self.dtype = width, dtype
        self.whole = nn.Sequential(*(parts(width) for _ in range(plan.stages))).to(dtype)
        self.modules = {
            stage: wrap(copy.deepcopy(self.whole[stage]), self.mesh["dp"]) for stage in places.stages_of[self.rank]
        }
        group = self.mesh["pp"].get_group()
        stages = [
            PipelineStage(module, stage, plan.stages, "cpu", group=group) for stage, module in self.modules.items()
        ]
        loss = nn.functional.mse_loss
        self.schedule: Any = (
            get_schedule_class(schedule)(stages, plan.microbatches, loss, **options)  # type: ignore[arg-type]
            if isinstance(schedule, str)
            else PlannedSchedule(stages, plan, loss, **options)
        )

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all replicas. The first number of a sample tells its replica."""
        generator = torch.Generator().manual_seed(seed)
        shape = (REPLICAS * SAMPLES, self.width)
        x, y = (torch.randn(shape, generator=generator, dtype=self.dtype) for _ in range(2))
        x[:SAMPLES, 0], x[SAMPLES:, 0] = -10, 10
        return x, y

    def half(self, seed: int) -> tuple[Tensor, Tensor]:
        """Those of this replica."""
        x, y = self.batch(seed)
        return x.chunk(REPLICAS)[self.replica], y.chunk(REPLICAS)[self.replica]

    def step(self, seed: int = 0) -> float:
        """A step of both pipelines on their halves, and of the whole model on the whole batch: its loss."""
        x, y = self.batch(seed)
        loss = nn.functional.mse_loss(self.whole(x), y)
        loss.backward()
        self.pipeline_step(seed)
        return loss.item()

    def pipeline_step(self, seed: int = 0) -> None:
        """A step of both pipelines only."""
        x, y = self.half(seed)
        self.schedule.step(*((x,) if self.is_first else ()), **({"target": y} if self.is_last else {}))

    def check_eval(self, seed: int) -> None:
        """The pipelines' output, beside that of the whole model."""
        x, y = self.half(seed)
        output = self.schedule.eval(*((x,) if self.is_first else ()), **({"target": y} if self.is_last else {}))
        if self.is_last:
            with torch.no_grad():
                torch.testing.assert_close(output, self.whole(x))

    def optimize(self) -> None:
        """An optimizer's step on both sides."""
        for module in (self.whole, *self.modules.values()):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.001)
            optimizer.step()
            optimizer.zero_grad()

    def check_gradients(self) -> None:
        """Every gradient of this process's stages, beside that of the whole model."""
        for stage, module in self.modules.items():
            wanted = dict(self.whole[stage].named_parameters())
            found = {name.removeprefix("module."): parameter for name, parameter in module.named_parameters()}
            assert found.keys() == wanted.keys()
            for name, parameter in found.items():
                check_gradient(f"{stage}.{name}", parameter, wanted[name].grad)


def check_gradient(name: str, parameter: Tensor, wanted: Tensor | None, *, tolerance: float = 1e-12) -> None:
    """One gradient, whole or in shards, beside the one that it should be."""
    found = parameter.grad
    assert (found is None) == (wanted is None), f"{name}: found {found}, wanted {wanted}"
    if found is not None:
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(
            whole, wanted, atol=tolerance, rtol=1e3 * tolerance, msg=lambda text: f"{name}: {text}"
        )
