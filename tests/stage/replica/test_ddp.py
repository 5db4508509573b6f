"""DistributedDataParallel around a stage: averaged once per step, with all that it offers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.stage.replica.pipeline_grid import MICROBATCHES, SAMPLES, Block, Grid, Part, plan_of
from tests.stage.replica.wrappers import copied
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed


SPLIT = "ZBVZeroBubble"


# ------------------------------------------------------------------------------------------------- once, and when asked


def average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DistributedDataParallel does without a hook."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def count_averages(grid: Grid) -> dict[tuple[int, int], int]:
    """How often each bucket of each stage has been averaged, from now on."""
    calls: Counter[tuple[int, int]] = Counter()
    group = grid.mesh["dp"].get_group()

    def listen_to(stage: int, module: Any) -> None:
        def count(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            calls[stage, bucket.index()] += 1
            return average(group, bucket)

        module.register_comm_hook(None, lambda state, bucket: count(bucket))

    for stage, module in grid.modules.items():
        listen_to(stage, module)
    return calls


def average_once(number: int, schedule: str, wrap: Callable[..., Any]) -> None:
    grid = Grid(number, schedule, wrap)
    calls = count_averages(grid)
    for seed in range(3):
        grid.step(seed)
        grid.check_gradients()
        assert {stage for stage, _ in calls} == set(grid.modules)
        assert set(calls.values()) == {1}
        calls.clear()
        grid.check_eval(seed)
    assert not calls
    grid.optimize()
    grid.step(3)
    grid.check_gradients()


@pytest.mark.parametrize("schedule", sampled(["1F1B", SPLIT], lambda name: name == SPLIT))
@pytest.mark.parametrize(
    "options",
    sampled(
        [
            {},
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"gradient_as_bucket_view": True},
            {"bucket_cap_mb": 0.0001},
            {"static_graph": True, "gradient_as_bucket_view": True, "find_unused_parameters": True},
        ],
        lambda options: len(options) != 1,
    ),
    ids=str,
)
def test_each_bucket_is_averaged_once_a_step(ranks: Ranks, schedule: str, options: dict[str, Any]) -> None:
    ranks.run(average_once, schedule, partial(copied, **options))


def average_later(number: int) -> None:
    grid = Grid(number, SPLIT, copied)
    with contextlib.ExitStack() as stack:
        for module in grid.modules.values():
            stack.enter_context(module.no_sync())  # type: ignore[operator]
        grid.step(0)
        before = [parameter.grad.clone() for module in grid.modules.values() for parameter in module.parameters()]
    copies = [[torch.empty_like(gradient) for _ in range(2)] for gradient in before]
    for gradient, others in zip(before, copies, strict=True):
        dist.all_gather(others, gradient, group=grid.mesh["dp"].get_group())
        assert not torch.equal(*others)
    grid.step(1)
    grid.check_gradients()


def test_no_sync_of_the_user_puts_the_average_off(ranks: Ranks) -> None:
    ranks.run(average_later)


def listen(number: int, schedule: str) -> None:
    grid = Grid(number, schedule, copied)
    heard: Counter[str] = Counter()

    def note_gradient(name: str, gradient: Tensor) -> None:
        assert gradient is not None
        heard[f"gradient of {name}"] += 1

    def note_sum(name: str, parameter: Tensor) -> None:
        heard[f"sum of {name}"] += 1

    for stage, module in grid.modules.items():
        for name, parameter in module.named_parameters():
            parameter.register_hook(partial(note_gradient, f"{stage}.{name}"))
            parameter.register_post_accumulate_grad_hook(partial(note_sum, f"{stage}.{name}"))
    grid.step()
    grid.check_gradients()
    assert set(heard.values()) == {MICROBATCHES}


@pytest.mark.parametrize("schedule", ["1F1B", SPLIT])
def test_hooks_of_the_user_hear_each_microbatch_and_not_the_average(ranks: Ranks, schedule: str) -> None:
    ranks.run(listen, schedule)


class HalfCopied(Part):
    """A stage of which DistributedDataParallel has only the blocks."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale.requires_grad_(False)


def copy_blocks(module: Any, mesh: Any) -> nn.Module:
    module.blocks = nn.ModuleList(copied(block, mesh) for block in module.blocks)
    return module


def average_parts(number: int) -> None:
    grid = Grid(number, "1F1B", copy_blocks, parts=HalfCopied)
    grid.step()
    for stage, module in grid.modules.items():
        for name, wanted in grid.whole[stage].blocks.named_parameters():  # type: ignore[union-attr, operator]
            block, rest = name.split(".", 1)
            found = module.get_parameter(f"blocks.{block}.module.{rest}")
            torch.testing.assert_close(found.grad, wanted.grad)


def test_parts_of_a_stage(ranks: Ranks) -> None:
    ranks.run(average_parts)


# ----------------------------------------------------------------------------------------------- parameters without use


class Choosy(Part):
    """Uses one block for the samples of one replica only, and another one never."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.sometimes, self.never = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 0
        if bool(chosen.any()):
            x = torch.where(chosen, self.sometimes(x), x)
        return super().forward(x)


def use_some(number: int, schedule: str, options: dict[str, Any]) -> None:
    grid = Grid(number, schedule, partial(copied, **options), parts=Choosy)
    for seed in range(3):
        grid.step(seed)
        grid.check_gradients()
    grid.optimize()
    grid.step(3)
    grid.check_gradients()
    for stage, module in grid.modules.items():
        assert grid.whole[stage].get_parameter("never.up.weight").grad is None
        assert grid.whole[stage].get_parameter("sometimes.up.weight").grad is not None
        assert module.get_parameter("module.never.up.weight").grad is None


@pytest.mark.parametrize("schedule", sampled(["1F1B", SPLIT], lambda name: name == SPLIT))
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_parameters_that_one_copy_or_none_uses(ranks: Ranks, schedule: str, option: str) -> None:
    ranks.run(use_some, schedule, {option: True})


class Idle(Part):
    """Does nothing for the samples of one replica."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 0
        return torch.where(chosen, super().forward(x), x) if bool(chosen.any()) else x


def let_first_stage_idle(number: int) -> None:
    made: list[nn.Module] = []

    def part(width: int) -> nn.Module:
        made.append(Part(width) if made else Idle(width))
        return made[-1]

    grid = Grid(number, "1F1B", partial(copied, find_unused_parameters=True), parts=part)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()


def test_a_copy_that_uses_no_parameter_at_all(ranks: Ranks) -> None:
    ranks.run(let_first_stage_idle)


def freeze_one(number: int) -> None:
    grid = Grid(number, "1F1B", partial(copied, find_unused_parameters=True))
    for stage, module in grid.modules.items():
        module.get_parameter("module.blocks.0.up.weight").requires_grad_(False)
        grid.whole[stage].get_parameter("blocks.0.up.weight").requires_grad_(False)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()


def test_parameters_frozen_between_steps(ranks: Ranks) -> None:
    ranks.run(freeze_one)


# -------------------------------------------------------------------------------------------------------------- buffers


class Normed(Part):
    """Counts what it has seen in buffers."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen = nn.BatchNorm1d(width, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen(x.detach())
        return super().forward(x)


def copy_buffers(number: int) -> None:
    grid = Grid(number, plan_of("1F1B", microbatches=SAMPLES // 2), copied, parts=Normed)
    for _ in range(2):
        grid.pipeline_step()
        assert len(means_of_copies(grid)) == 2
    (module,) = grid.modules.values()
    module.eval()
    x, y = grid.half(0)
    grid.schedule.eval(*((x,) if grid.is_first else ()), **({"target": y} if grid.is_last else {}))
    assert len(means_of_copies(grid)) == 1


def means_of_copies(grid: Grid) -> set[float]:
    """What a buffer of this rank's stage has, in each copy."""
    (module,) = grid.modules.values()
    mean = module.get_buffer("module.seen.running_mean")
    copies = [torch.empty_like(mean) for _ in range(2)]
    dist.all_gather(copies, mean, group=grid.mesh["dp"].get_group())
    return {copy.sum().item() for copy in copies}


def test_buffers_of_the_first_copy_begin_each_step(ranks: Ranks) -> None:
    ranks.run(copy_buffers)
