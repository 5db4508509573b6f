"""What does not fit together is an error on every rank, with its reason; nobody hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipecut import PipelineStage, StepError
from pipecut.errors import DisagreementError, InputError
from tests.stage.replica.pipeline_grid import REPLICAS, Block, Grid, Part, Wrap, plan_of
from tests.stage.replica.wrappers import copied, sharded
from tests.support.limits import PATIENCE
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


Case = Callable[[int], str]


def message_of(kind: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What an error says that a call has to raise."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def same_on_all(ranks: Ranks, case: Callable[..., str], *args: Any) -> str:
    """What the error says on every rank."""
    messages = set(ranks.run(case, *args))
    assert len(messages) == 1, messages
    return messages.pop()


# ---------------------------------------------------------------------------------------------- the wrong process group


def copied_over_all(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module)


def sharded_over_all(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (4,)))


def copy_over_the_pipeline(number: int, wrap: Wrap) -> str:
    return message_of(InputError, Grid, number, "1F1B", wrap)


@pytest.mark.parametrize("wrap", [copied_over_all, sharded_over_all])
def test_copies_among_the_ranks_of_the_pipeline(ranks: Ranks, wrap: Wrap) -> None:
    """Where all stages have the same shapes, DistributedDataParallel itself would average them with each other."""
    messages = ranks.run(copy_over_the_pipeline, wrap)
    for number, message in enumerate(messages):
        neighbour = number ^ 1
        assert message == (
            f"stage {number % 2} is copied or sharded over ranks [0, 1, 2, 3], of which [{neighbour}] hold other "
            "stages of the same pipeline. Give DistributedDataParallel the process_group, and fully_shard the mesh, "
            'of the data-parallel ranks: for mesh_dim_names=("dp", "pp") those of mesh["dp"]'
        )


def plan_differently(number: int, wrap: Wrap) -> str:
    replica = number // REPLICAS
    grid = Grid(number, "1F1B" if replica == 0 else "GPipe", wrap)
    return message_of(DisagreementError, grid.pipeline_step)


@pytest.mark.parametrize("wrap", [copied, sharded])
def test_copies_with_another_plan(ranks: Ranks, wrap: Wrap) -> None:
    message = same_on_all(ranks, plan_differently, wrap)
    assert "schedule: 1F1B on rank 0; GPipe on rank 1" in message


# ----------------------------------------------------------------------------------------------- parameters without use


class Wasteful(Part):
    """Has a block that it does not use, until it is told to."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spare = Block(width)
        self.is_spare = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.is_spare else self.spare(x))


def waste(number: int) -> str:
    grid = Grid(number, "1F1B", copied, parts=Wasteful)
    return message_of(StepError, grid.pipeline_step).split("InputError: ")[1]


def test_unused_parameters_without_a_search_for_them(ranks: Ranks) -> None:
    assert same_on_all(ranks, waste) == (
        "spare.down.weight, spare.norm.bias, spare.norm.weight, spare.up.bias, spare.up.weight got no gradient in this "
        "step: give DistributedDataParallel find_unused_parameters=True, or freeze what the stage does not use before "
        "making it"
    )


class Choosy(Part):
    """Uses a block for the samples of one replica only."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.rare = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rare(x) if bool((x[:, 0] > 0).all()) else x)


def use_in_one_copy(number: int) -> str:
    grid = Grid(number, "1F1B", copied, parts=Choosy)
    return message_of(StepError, grid.pipeline_step).split("InputError: ")[1]


def test_parameters_that_only_one_copy_uses(ranks: Ranks) -> None:
    """The copy that uses them had its average and returned; it heard of the other's error in its next step."""
    message = same_on_all(ranks, use_in_one_copy)
    assert message.startswith("rare.down.weight, rare.norm.bias, rare.norm.weight, rare.up.bias, rare.up.weight got no")


class Louder(Part):
    """Has a layer without parameters, which DistributedDataParallel does not look for."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.extra = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(super().forward(x))


def have_other_layers(number: int) -> str:
    grid = Grid(number, "1F1B", copied, parts=Louder if number // 2 else Part)
    return message_of(DisagreementError, grid.pipeline_step)


def test_copies_that_hold_other_layers(ranks: Ranks) -> None:
    for number, message in enumerate(ranks.run(have_other_layers)):
        assert f"stage {number % 2} and its copies: 11 modules and 11 tensors" in message
        assert "on rank 0; 12 modules and 11 tensors" in message


def lose_a_copy(number: int) -> str:
    grid = Grid(number, "1F1B", copied)
    x, y = grid.half(0)
    y = y * float("nan") if grid.replica == 1 else y

    def step() -> None:
        grid.schedule.step(*((x,) if grid.is_first else ()), **({"target": y} if grid.is_last else {}))

    message = message_of(StepError, step)
    assert all(parameter.grad is None for module in grid.modules.values() for parameter in module.parameters())
    grid.step()
    grid.check_gradients()
    return message


def test_a_loss_that_is_nan_in_one_pipeline_is_an_error_in_all(ranks: Ranks) -> None:
    message = same_on_all(ranks, lose_a_copy)
    assert message.startswith("the step failed: rank 3 (rank 1 of its pipeline) failed after its last action: ")


def stop(number: int, wrap: Wrap, timeout: float, folder: Path) -> str:
    """Rank 3 is stopped in a backward, and goes on when all others have given up."""
    grid = Grid(number, "1F1B", wrap, timeout=timeout)
    grid.pipeline_step(0)
    for module in grid.modules.values():
        module.zero_grad()
    if number == 3:
        (folder / "pid").write_text(str(os.getpid()))
        hook = next(grid.modules[1].parameters()).register_post_accumulate_grad_hook
        hook(lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    message = message_of(StepError, lambda: grid.pipeline_step(1))
    (folder / str(number)).touch()
    if number == 0:
        while not all((folder / str(other)).exists() for other in (1, 2)):
            time.sleep(0.05)
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    return message


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [copied, sharded])
def test_a_copy_that_is_stopped(tmp_path: Path, wrap: Wrap) -> None:
    """Its copy waited in a collective, which knows the group's timeout only: here minutes."""
    with Ranks(4) as ranks:
        for message in ranks.run(stop, wrap, 2.0 * PATIENCE, tmp_path):
            assert "timed out waiting for" in message
            assert "has ended or was killed" not in message


def use_later(number: int) -> str:
    grid = Grid(number, "1F1B", partial(copied, static_graph=True), parts=Wasteful)
    grid.pipeline_step()
    for module in grid.modules.values():
        module.zero_grad()
        module.module.is_spare = False  # type: ignore[union-attr]
    return message_of(StepError, grid.pipeline_step).split("InputError: ")[1]


def test_static_graphs_that_change(ranks: Ranks) -> None:
    assert same_on_all(ranks, use_later) == (
        "spare.down.weight, spare.norm.bias, spare.norm.weight, spare.up.bias, spare.up.weight got a gradient now and "
        "none in the first step; DistributedDataParallel with static_graph=True does not average it: use "
        "find_unused_parameters=True instead"
    )


class Frozen(Part):
    """One of its parameters is not trained, for the time being."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale.requires_grad_(False)


def unfreeze(number: int) -> str:
    grid = Grid(number, "1F1B", copied, parts=Frozen)
    grid.step()
    for module in grid.modules.values():
        module.zero_grad()
        module.get_parameter("module.scale").requires_grad_(True)
    return message_of(StepError, grid.pipeline_step).split("InputError: ")[1]


def test_parameters_unfrozen_between_steps(ranks: Ranks) -> None:
    assert same_on_all(ranks, unfreeze) == (
        "scale was frozen when DistributedDataParallel was made, which does not average it: unfreeze parameters "
        "before, or make DistributedDataParallel and the stage anew"
    )


# ------------------------------------------------------------------------------------------ what a stage is not made of


def stage_of(module: nn.Module) -> PipelineStage:
    return PipelineStage(module, 0, 4, "cpu")


def freeze_before_the_stage(number: int) -> str:
    module = DistributedDataParallel(Part(4))
    module.get_parameter("module.scale").requires_grad_(False)
    return message_of(InputError, stage_of, module)


def test_parameters_frozen_before_the_stage_is_made(ranks: Ranks) -> None:
    assert same_on_all(ranks, freeze_before_the_stage) == (
        "DistributedDataParallel was made with 11 parameters to train, and 10 are to be trained now: freeze and "
        "unfreeze parameters before"
    )


def run_before_the_stage(number: int) -> str:
    module = DistributedDataParallel(Part(4), static_graph=True)
    module(torch.randn(2, 4)).sum().backward()
    return message_of(InputError, stage_of, module)


def test_static_graphs_that_were_trained_before(ranks: Ranks) -> None:
    assert same_on_all(ranks, run_before_the_stage) == (
        "DistributedDataParallel with static_graph=True has run outside of the pipeline, and expects each step to be "
        "like that: make it anew for the stage"
    )


def delay_some(number: int) -> str:
    part = Part(4)
    delayed = [("scale", part.scale)]
    module = DistributedDataParallel(
        part, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=part.blocks[0].up.weight
    )
    return message_of(InputError, stage_of, module)


def lower_precision(number: int) -> str:
    from torch.nn.parallel.distributed import _MixedPrecision

    module = DistributedDataParallel(Part(4), mixed_precision=_MixedPrecision(torch.bfloat16))
    return message_of(InputError, stage_of, module)


@pytest.mark.parametrize(
    ("case", "name"), [(delay_some, "delay_all_reduce_named_params"), (lower_precision, "mixed_precision")]
)
def test_options_that_average_in_every_backward(ranks: Ranks, case: Case, name: str) -> None:
    assert same_on_all(ranks, case) == (
        f"DistributedDataParallel with {name} averages in every backward, and a stage has many in a step: leave it "
        "out. For lower precision use autocast, or fully_shard with a MixedPrecisionPolicy"
    )


def mix(number: int) -> str:
    mesh = init_device_mesh("cpu", (4,))
    return message_of(
        InputError, stage_of, nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh), copied(nn.Linear(4, 4), mesh))
    )


def test_both_kinds_in_one_stage(ranks: Ranks) -> None:
    assert same_on_all(ranks, mix) == (
        "a stage holds both DistributedDataParallel and fully_shard modules: use one of the two for all its parts"
    )


def shard_in_the_old_way(number: int) -> str:
    old = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    return message_of(InputError, stage_of, nn.Sequential(old))


def test_wrappers_that_cannot_be_steered(ranks: Ranks) -> None:
    assert same_on_all(ranks, shard_in_the_old_way) == (
        "'0' of a stage is under FullyShardedDataParallel (FSDP1), which a pipeline cannot steer: use fully_shard "
        "instead"
    )


# --------------------------------------------------------------------------------------------------- one pipeline fails


def fail_in_one_pipeline(number: int, schedule: str, wrap: Wrap) -> str:
    grid = Grid(number, schedule, wrap)
    grid.step()
    if number == 0:
        (module, *_) = grid.modules.values()
        module.register_forward_pre_hook(_burst)
    return message_of(StepError, grid.pipeline_step)


def _burst(*_: Any) -> None:
    raise ValueError("a pipe has burst")


@pytest.mark.parametrize("wrap", [copied, sharded])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_that_fails_takes_its_copies_down(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    message = same_on_all(ranks, fail_in_one_pipeline, schedule, wrap)
    assert "rank 0 failed in 0F0" in message
    assert "ValueError: a pipe has burst" in message


def fail_in_a_bare_plan(number: int) -> str:
    grid = Grid(number, plan_of("1F1B").lower(), sharded)
    if number == 3:
        (module,) = grid.modules.values()
        module.register_forward_pre_hook(_burst)
    return message_of(StepError, grid.pipeline_step)


def test_a_pipeline_that_fails_while_others_gather(ranks: Ranks) -> None:
    message = same_on_all(ranks, fail_in_a_bare_plan)
    assert "rank 3 (rank 1 of its pipeline) failed in 1F0" in message
