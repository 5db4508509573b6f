"""One rank of a job on a mesh of copies, stages and tensor-parallel parts, beside the uncut model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pipecut import Pipe, PipelineStage, SplitPoint, get_schedule_class, pipeline
from pipecut.schedule import Plan, plan_for

WORDS, WIDTH, HEADS, BLOCKS, LENGTH = 16, 8, 2, 4, 5
MICROBATCHES, SAMPLES = 4, 6  # of each pipeline: microbatches of 2, 2, 1 and 1 samples
ONE_STAGE = ("GPipe", "1F1B", "ZB-H1")


class Attention(nn.Module):
    """Attention over as many heads as its layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A small language model; tied, it has one table for its input and its output."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Part(nn.Module):
    """The part of a language model that someone cuts out by hand, with the names of the model."""

    def __init__(self, model: Language, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if 0 in blocks:
            self.words = model.words
        if BLOCKS - 1 in blocks:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) if hasattr(self, "words") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x  # type: ignore[no-any-return]


def next_words(output: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


# Wrappers, each a function of the module of a stage and the mesh of all ranks.

Wrap = Callable[[Any, DeviceMesh], nn.Module]

BLOCK_PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def blocks_of(module: Any) -> list[nn.Module]:
    return list(module.blocks.values() if isinstance(module.blocks, nn.ModuleDict) else module.blocks)


def alone(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def copied(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh["dp"].get_group())


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(module, process_group=mesh["dp"].get_group())


def replicated_by_fsdp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for block in blocks_of(module):
        replicate(block, mesh=mesh["dp"])
    return replicate(module, mesh=mesh["dp"])


def sharded(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh["dp"], **options)
    return fully_shard(module, mesh=mesh["dp"], **options)


def parallel(module: Any, mesh: DeviceMesh) -> nn.Module:
    for block in blocks_of(module):
        parallelize_module(block, mesh["tp"], BLOCK_PLAN)
    return module  # type: ignore[no-any-return]


def parallel_ends(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The blocks, and the tables of words at both ends, each in shards of words."""
    parallel(module, mesh)
    ends = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {name: style for name, style in ends.items() if hasattr(module, name)}
    return parallelize_module(module, mesh["tp"], plan) if plan else module


def parallel_and_sharded(module: Any, mesh: DeviceMesh) -> nn.Module:
    return sharded(parallel_ends(module, mesh), mesh)


def parallel_and_replicated_by_ddp(module: Any, mesh: DeviceMesh) -> nn.Module:
    return replicated(parallel(module, mesh), mesh)


def parallel_and_replicated(module: Any, mesh: DeviceMesh) -> nn.Module:
    return replicated_by_fsdp(parallel(module, mesh), mesh)


# The job.


@dataclass
class Job:
    """One rank's stages, its data, and the whole model and data beside them."""

    mesh: DeviceMesh
    whole: Language
    schedule: Any
    modules: dict[int, nn.Module]
    plan: Plan
    pipe: Pipe | None  # kept, for stages refer to it weakly

    @property
    def replicas(self) -> int:
        return self.mesh["dp"].size() if "dp" in (self.mesh.mesh_dim_names or ()) else 1

    @property
    def replica(self) -> int:
        return self.mesh["dp"].get_local_rank() if self.replicas > 1 else 0

    def batch(self, seed: int) -> Tensor:
        """Words of all pipelines, which are inputs and targets."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(WORDS, (self.replicas * SAMPLES, LENGTH), generator=generator)

    def step(self, seed: int = 0, **options: Any) -> None:
        """A step of this rank, on the part of the batch that its pipeline has."""
        tokens = self.batch(seed).chunk(self.replicas)[self.replica]
        first, last = 0 in self.modules, self.plan.stages - 1 in self.modules
        self.schedule.step(*((tokens,) if first else ()), **({"target": tokens} if last else {}), **options)

    def whole_step(self, seed: int = 0) -> float:
        """The same step of the whole model: its loss."""
        tokens = self.batch(seed)
        loss = next_words(self.whole(tokens), tokens)
        loss.backward()
        return loss.item()

    def named(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by the model's names."""
        pairs = [pair for module in self.modules.values() for pair in module.named_parameters(remove_duplicate=False)]
        return {name.removeprefix("module."): parameter for name, parameter in pairs}

    def check_gradients(self, tolerance: float = 1e-10) -> None:
        """Every gradient, gathered whole, beside the whole model's."""
        wanted = dict(self.whole.named_parameters(remove_duplicate=False))
        for name, parameter in self.named().items():
            close(f"the gradient of {name}", parameter.grad, wanted[name].grad, tolerance)

    def check_values(self, tolerance: float = 1e-10) -> None:
        """Every parameter, gathered whole, beside the whole model's."""
        wanted = dict(self.whole.named_parameters(remove_duplicate=False))
        for name, parameter in self.named().items():
            close(name, parameter.detach(), wanted[name].detach(), tolerance)


def close(name: str, found: Tensor | None, wanted: Tensor | None, tolerance: float) -> None:
    assert (found is None) == (wanted is None), f"{name}: found {found}, wanted {wanted}"
    if found is not None:
        full = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(full, wanted, atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}")


def make_job(
    sizes: Mapping[str, int],
    schedule: str,
    wrap: Wrap,
    *,
    traced: bool = True,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> Job:
    """Make the stages of this rank, wrap them, and make the schedule."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    ranks = mesh["pp"].size()
    plan = plan_for(schedule, ranks=ranks, chunks=1 if schedule in ONE_STAGE else 2, microbatches=MICROBATCHES)
    torch.manual_seed(seed)
    whole = Language(tied=tied).to(dtype)
    model = copy.deepcopy(whole)
    here = plan.placement.stages_of[mesh["pp"].get_local_rank()]
    group = mesh["pp"].get_group()
    size = BLOCKS // plan.stages
    pipe: Pipe | None = None
    if traced:
        cuts = {f"blocks.{size * stage}": SplitPoint.BEGINNING for stage in range(1, plan.stages)}
        pipe = pipeline(model, (torch.zeros(2, LENGTH, dtype=torch.long),), split_spec=cuts)
        stages = [pipe.build_stage(stage, "cpu", group=group) for stage in here]
        for stage in stages:
            stage.submod = wrap(stage.submod, mesh)
    else:
        parts = {stage: wrap(Part(model, range(size * stage, size * (stage + 1))), mesh) for stage in here}
        stages = [PipelineStage(part, stage, plan.stages, "cpu", group=group) for stage, part in parts.items()]
        if tied and plan.stages > 1:
            options["ties"] = [{0: "words.weight", plan.stages - 1: "head.weight"}]
    kind: Any = get_schedule_class(schedule)
    runner = kind(stages, MICROBATCHES, next_words, **options)
    return Job(mesh, whole, runner, {stage.stage_index: stage.submod for stage in stages}, plan, pipe)
