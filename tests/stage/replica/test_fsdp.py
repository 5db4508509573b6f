"""fully_shard on stages and their blocks: gathered by the plan, reduced once per step, in any precision."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from pipecut import PipelineStage, get_schedule_class
from pipecut.schedule import Action, Op
from tests.stage.replica.pipeline_grid import (
    MICROBATCHES,
    REPLICAS,
    SAMPLES,
    Block,
    Grid,
    Part,
    check_gradient,
    plan_of,
)
from tests.stage.replica.wrappers import sharded
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed


SPLIT = "ZBVZeroBubble"
LARGE = 400  # wide enough that the split backward puts weight gradients off
# The collectives of fully_shard, which have new names in newer releases of torch.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
PARTS = 3  # of each stage: two blocks and the rest


# -------------------------------------------------------------------------------------------- how often it communicates


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the collectives of fully_shard."""
    calls: Counter[str] = Counter()

    def spy(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with spy(GATHER), spy(REDUCE):
        yield calls


def communicate(number: int, schedule: str, options: dict[str, Any]) -> None:
    grid = Grid(number, schedule, partial(sharded, **options))
    parts = PARTS * len(grid.modules)
    for seed in range(2):
        with counted() as calls:
            grid.step(seed)
        assert calls == {GATHER: parts, REDUCE: parts}, calls
        with counted() as calls:
            grid.check_eval(seed)
        assert calls == {GATHER: parts}, calls
    grid.check_gradients()


@pytest.mark.parametrize(
    "options",
    sampled([{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}], lambda options: len(options)),
    ids=str,
)
@pytest.mark.parametrize("schedule", sampled(["1F1B", SPLIT], lambda name: name == SPLIT))
def test_gathered_and_reduced_once_a_step(ranks: Ranks, schedule: str, options: dict[str, Any]) -> None:
    """If all stages of a rank may be held at a time, the plan gathers each once, for all microbatches."""
    ranks.run(communicate, schedule, options)


def communicate_with_little_memory(number: int) -> None:
    plan = plan_of("Interleaved1F1B")
    grid = Grid(number, plan.lower(max_held=1), sharded)
    gathers = sum(f"{action}".endswith("UNSHARD") for action in grid.schedule.plan.actions[grid.rank])
    assert gathers > len(grid.modules)
    with counted() as calls:
        grid.step()
    assert calls == {GATHER: PARTS * gathers, REDUCE: PARTS * len(grid.modules)}, calls
    grid.check_gradients()


def test_gathered_as_often_as_the_plan_says(ranks: Ranks) -> None:
    ranks.run(communicate_with_little_memory)


def gather_in_vain(number: int) -> None:
    plan = plan_of("1F1B").lower(max_held=1)
    rows = [[*row, Action(stage, Op.UNSHARD), Action(stage, Op.RESHARD)] for stage, row in enumerate(plan.actions)]
    grid = Grid(number, plan.with_actions(rows), sharded)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()
        grid.optimize()


def test_parameters_that_were_gathered_in_vain_are_not_used_later(ranks: Ranks) -> None:
    """An optimizer changes them in between."""
    ranks.run(gather_in_vain)


def look_at_parameters(number: int, schedule: str) -> None:
    grid = Grid(number, schedule, sharded)
    for training in (True, False):
        if training:
            grid.step()
        else:
            grid.check_eval(0)
        for module in grid.modules.values():
            for name, parameter in module.named_parameters():
                assert isinstance(parameter, DTensor), name


@pytest.mark.parametrize("schedule", ["1F1B", SPLIT])
def test_nothing_stays_gathered_after_a_step(ranks: Ranks, schedule: str) -> None:
    ranks.run(look_at_parameters, schedule)


def use_alone_afterwards(number: int) -> None:
    grid = Grid(number, "1F1B", sharded)
    grid.pipeline_step()
    for stage, module in grid.modules.items():
        module.zero_grad()
        x, y = grid.half(1)
        nn.functional.mse_loss(module(x), y).backward()
        whole_x, whole_y = grid.batch(1)
        nn.functional.mse_loss(grid.whole[stage](whole_x), whole_y).backward()
    grid.check_gradients()


def test_the_module_works_by_itself_after_a_step(ranks: Ranks) -> None:
    """What a step sets for its microbatches does not outlast it."""
    ranks.run(use_alone_afterwards)


# ------------------------------------------------------------------------------------------------------------ precision


def average_in_low_precision(grid: Grid) -> dict[int, dict[str, Tensor]]:
    """The gradients of bfloat16 stages, microbatch by microbatch, summed and averaged in float32."""
    low = [low_precision_copy(grid.whole[stage]) for stage in range(len(grid.whole))]
    sums: dict[int, dict[str, Tensor]] = {stage: {} for stage in range(len(low))}
    x, y = grid.batch(0)
    for replica in range(REPLICAS):
        start = replica * SAMPLES
        for size in (2, 2, 1, 1):
            value = x[start : start + size]
            for part in low:
                value = part(value.bfloat16()).float()
            loss = nn.functional.mse_loss(value, y[start : start + size])
            loss.backward(torch.tensor(size / SAMPLES))
            for stage, part in enumerate(low):
                for name, parameter in part.named_parameters():
                    assert parameter.grad is not None
                    share = parameter.grad.float() / REPLICAS
                    sums[stage][name] = sums[stage].get(name, torch.zeros_like(share)) + share
                part.zero_grad()
            start += size
    return sums


def low_precision_copy(part: nn.Module) -> nn.Module:
    copy = Part(len(part.get_parameter("scale")))
    copy.load_state_dict(part.state_dict())
    return copy.bfloat16()


def train_in_low_precision(number: int, schedule: Any) -> None:
    grid = Grid(number, schedule, sharded_in_low_precision, dtype=torch.float32)
    wanted = average_in_low_precision(grid)
    grid.pipeline_step()
    for stage, module in grid.modules.items():
        for name, parameter in module.named_parameters():
            assert parameter.dtype == torch.float32
            check_gradient(f"{stage}.{name}", parameter, wanted[stage][name], tolerance=1e-6)


def sharded_in_low_precision(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Parameters in bfloat16; gradients are summed, and stages give their results, in float32."""
    inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=True)
    return fully_shard(module, mesh=mesh, mp_policy=outer, reshard_after_forward=True)


@pytest.mark.parametrize("is_planned", sampled([True, False], lambda is_planned: is_planned))
@pytest.mark.parametrize("schedule", sampled(["1F1B", "ZB-H1", SPLIT], lambda name: name == SPLIT))
def test_low_precision_is_added_up_in_high_precision(ranks: Ranks, schedule: str, is_planned: bool) -> None:
    """Whether the plan says when to gather, or every forward gathers and frees for itself."""
    ranks.run(train_in_low_precision, schedule if is_planned else plan_of(schedule).lower())


# --------------------------------------------------------------------------------------------------- what else there is


class Convolved(Part):
    """Has an operation whose weight gradient takes the weight itself, and a part that is computed twice."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mix = nn.Conv1d(width // 2, width // 2, 5, padding=2)
        self.again = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.unflatten(1, (-1, 2))).flatten(1)
        x = checkpoint(self.again, x, use_reentrant=False)
        return super().forward(x)


def train_with(number: int, schedule: Any, wrap: Any, parts: Any, width: int) -> None:
    grid = Grid(number, schedule, wrap, parts=parts, width=width)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()


@pytest.mark.parametrize("is_planned", sampled([True, False], lambda is_planned: is_planned))
@pytest.mark.parametrize("width", sampled([8, LARGE], lambda width: width == 8))
def test_convolutions_and_checkpoints(ranks: Ranks, width: int, is_planned: bool) -> None:
    schedule = SPLIT if is_planned else plan_of(SPLIT).lower()
    ranks.run(train_with, schedule, partial(sharded, reshard_after_forward=True), Convolved, width)


class Frozen(Part):
    """Trains half of its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


def train_frozen(number: int, schedule: str, parts: Any) -> None:
    grid = Grid(number, schedule, sharded, parts=parts)
    if parts is Part:
        for module in (grid.whole[0], grid.modules.get(0)):
            if module is not None:
                module.requires_grad_(False)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()


@pytest.mark.parametrize("parts", [Frozen, Part])
@pytest.mark.parametrize("schedule", sampled(["1F1B", SPLIT], lambda name: name == SPLIT))
def test_frozen_parameters_and_a_frozen_stage(ranks: Ranks, schedule: str, parts: Any) -> None:
    ranks.run(train_frozen, schedule, parts)


def test_parameters_on_the_cpu(ranks: Ranks) -> None:
    ranks.run(train_with, SPLIT, partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)), Part, 8)


def replicated(module: Any, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for block in module.blocks:
        replicate(block, mesh=mesh)
    replicate(module, mesh=mesh)
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["1F1B", SPLIT])
def test_replicate(ranks: Ranks, schedule: str) -> None:
    """The sibling of fully_shard that only copies."""
    ranks.run(train_with, schedule, replicated, Part, 8)


def train_in_one_process_each(number: int) -> None:
    """Four copies: all stages in each process, sharded over two, copied to two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    whole = nn.Sequential(*(Part(8) for _ in range(2))).double()
    modules = [Part(8).double() for _ in range(2)]
    for module, original in zip(modules, whole, strict=True):
        module.load_state_dict(original.state_dict())
        sharded(module, mesh)
    alone = dist.new_group([number], use_local_synchronization=True)  # a pipeline of its own in each process
    stages = [PipelineStage(module, stage, 2, "cpu", group=alone) for stage, module in enumerate(modules)]
    schedule = get_schedule_class("LoopedBFS")(stages, MICROBATCHES, nn.functional.mse_loss, ranks=1)  # type: ignore[arg-type]
    x, y = torch.randn(4 * SAMPLES, 8).double(), torch.randn(4 * SAMPLES, 8).double()
    for _ in range(2):
        nn.functional.mse_loss(whole(x), y).backward()
        schedule.step(x.chunk(4)[number], target=y.chunk(4)[number])
        for stage, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                check_gradient(f"{stage}.{name}", parameter, whole[stage].get_parameter(name).grad)


def test_stages_in_one_process_sharded_and_copied(ranks: Ranks) -> None:
    ranks.run(train_in_one_process_each)
