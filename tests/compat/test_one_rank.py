"""A process group of one rank has one rank: all stages are on it, and it needs nobody to agree with."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipecut import InputError
from pipecut.compat import PipelineStage, _ScheduleForwardOnly, schedules
from pipecut.compat.schedules import _PipelineScheduleRuntime
from tests.compat.test_subclassing import assert_as_uncut, batch, gradients_of, layers
from tests.compat.user_schedules import rows
from tests.support.live_memory import live_tensors, without_collector
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
V_SHAPED = ["ZBVZeroBubble", "DualPipeV"]
UPKEEP = "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD"
STORES: dict[str, Any] = {"gloo": dist.HashStore, "fake": FakeStore}


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of this process alone."""
    backend = getattr(request, "param", "gloo")
    dist.init_process_group(backend, store=STORES[backend](), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


on_both_backends = pytest.mark.parametrize("group", ["gloo", "fake"], indirect=True)
alone = pytest.mark.usefixtures("group")


def stages_of(modules: list[nn.Module]) -> list[PipelineStage]:
    return [PipelineStage(module, index, len(modules), "cpu") for index, module in enumerate(modules)]


def made(name: str, stages: list[PipelineStage], microbatches: int = 4) -> Any:
    kind: Any = schedules.get_schedule_class(name)
    return kind(stages, microbatches, loss_fn=nn.functional.mse_loss)


@alone
@on_both_backends
@pytest.mark.parametrize("name", MULTI)
def test_all_stages_are_on_the_one_rank(name: str, tmp_path: Path) -> None:
    """Every stage had a rank of its own, and the V schedules, which have two on each, could not be made."""
    stages = stages_of(layers(2))
    schedule = made(name, stages)
    x, y = batch()
    losses: list[Tensor] = []
    schedule.step(x, target=y, losses=losses)
    assert_as_uncut(gradients_of(stages), 2)
    assert len(losses) == 4
    assert sorted(schedule.pipeline_order) == sorted(schedule.pipeline_order_with_comms) == [0]
    assert schedule.pp_group_size == 1
    assert schedule.stage_index_to_group_rank == stages[0].stage_index_to_group_rank == {0: 0, 1: 0}
    schedule._dump_csv(tmp_path / "order.csv")
    (line,) = (tmp_path / "order.csv").read_text().splitlines()
    assert "SEND" not in line
    assert "RECV" not in line
    assert schedule.eval(x).shape == x.shape


@alone
@pytest.mark.parametrize("name", [*MULTI, "ForwardOnly"])
def test_ranks_can_still_be_asked_for(name: str) -> None:
    kind: Any = schedules.get_schedule_class(name)
    stages = stages_of(layers(4))
    schedule = kind(stages, 4, loss_fn=nn.functional.mse_loss, ranks=2)
    assert schedule.pp_group_size == 2
    x, y = batch()
    schedule.step(x, target=y)
    if schedule.plan.training:
        assert_as_uncut(gradients_of(stages), 4)


@alone
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_schedules_with_one_stage_a_rank_have_as_many_ranks_as_stages(name: str) -> None:
    stages = stages_of(layers(2))
    schedule = made(name, stages)
    assert sorted(schedule.pipeline_order) == [0, 1]
    x, y = batch()
    schedule.step(x, target=y)
    assert_as_uncut(gradients_of(stages), 2)


def test_without_a_process_group_every_stage_has_a_rank() -> None:
    assert sorted(made("Interleaved1F1B", stages_of(layers(2))).pipeline_order) == [0, 1]


@alone
@pytest.mark.parametrize("name", ["Interleaved1F1B", "DualPipeV"])
@pytest.mark.parametrize("passes_losses", [True, False])
def test_a_custom_function_sees_the_data_of_the_step(name: str, passes_losses: bool) -> None:
    """On a rank of its own stage 0 had no targets; and the losses were a dict, not the caller's list."""
    stages = stages_of(layers(2))
    schedule = made(name, stages)
    seen: list[tuple[int, int]] = []
    given: list[Tensor] | None = [] if passes_losses else None
    before: list[int] = []

    def forward(action: Any, context: Any) -> None:
        assert context.losses is given
        assert isinstance(context.target_mbs, list)
        assert isinstance(context.arg_mbs, list)
        before.append(len(schedule._internal_losses))
        context.run(action)
        seen.append((action.stage_index, len(context.target_mbs)))

    schedule.register_custom_function(schedules.FORWARD, forward)
    x, y = batch()
    schedule.step(x, target=y, losses=given)
    assert set(seen) == {(0, 4), (1, 4)}
    assert given is None or len(given) == 4
    assert before[0] == 0
    assert before[-1] == 3  # the last forward is that of the last stage
    assert schedule._internal_losses == []
    assert_as_uncut(gradients_of(stages), 2)


@alone
@on_both_backends
def test_an_order_with_upkeep_and_without_transfers() -> None:
    """It was taken for one of computations, and refused: it had UNSHARD already. FakeStore could not be written to."""
    modules = layers(2)
    mesh = init_device_mesh("cpu", (1,))
    for module in modules:
        fully_shard(module, mesh=mesh)
    schedule = _PipelineScheduleRuntime(stages_of(modules), 2, loss_fn=nn.functional.mse_loss)
    schedule.pipeline_order_with_comms = rows(UPKEEP)  # type: ignore[assignment]
    x, y = batch()
    schedule.tracing = True
    schedule.step(x, target=y)
    assert_as_uncut(whole(gradients_of(schedule.stages)), 2)
    assert [str(span.action) for span in schedule.trace().spans] == UPKEEP.split()
    schedule.eval(x)


def whole(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in gradients.items()}


def upkeep_on_ranks(rank: int) -> dict[str, Tensor]:
    module = layers(2)[rank]
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shards"))["shards"]
    fully_shard(module, mesh=mesh)
    stage = PipelineStage(module, rank, 2, "cpu")
    schedule = _PipelineScheduleRuntime([stage], 2, loss_fn=nn.functional.mse_loss)
    schedule.pipeline_order_with_comms = rows(  # type: ignore[assignment]
        "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD", "1UNSHARD 1F0 1F1 1B0 1B1 1REDUCE_GRAD 1RESHARD"
    )
    x, y = batch()
    schedule.step(x, target=y)
    return whole(gradients_of([stage]))


@pytest.mark.distributed
def test_an_order_with_upkeep_and_without_transfers_on_ranks(two_ranks: Ranks) -> None:
    """The transfers are added."""
    first, second = two_ranks.run(upkeep_on_ranks)
    assert_as_uncut({**first, **second}, 2)


@alone
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ForwardOnly"])
def test_a_stage_whose_neighbour_is_nowhere_has_an_order_and_no_step(name: str) -> None:
    schedule = made(name, stages_of(layers(2))[:1])
    assert schedule.pipeline_order[0]
    with pytest.raises(InputError, match=r"stages \[1\] are missing, and there is no rank that could hold them"):
        schedule.step(torch.ones(8, 6))


@alone
@on_both_backends
@pytest.mark.parametrize(
    "name",
    sampled(["GPipe", "1F1B", "_ScheduleForwardOnly", *MULTI], lambda name: name not in ("GPipe", *MULTI[:3])),
)
def test_no_tensor_is_left_alive_and_none_sits_in_a_cycle(name: str) -> None:
    kind: Any = _ScheduleForwardOnly if name.startswith("_") else schedules.get_schedule_class(name)
    stages = stages_of(layers(2 if name in MULTI else 1))
    schedule = kind(stages if name in MULTI else stages[0], 4, loss_fn=nn.functional.mse_loss)
    x, y = batch()
    options = {"target": y} if schedule.plan.training else {}

    def run() -> None:
        schedule.step(x, **options)
        schedule.eval(x, **options)

    run()
    with without_collector():
        run()
        gc.collect()  # what tests before this one have left to be found
        before = len(live_tensors())
        for _ in range(3):
            run()
        assert len(live_tensors()) == before
        assert gc.collect() == 0


@alone
def test_a_v_schedule_needs_two_stages_on_the_one_rank() -> None:
    for name in V_SHAPED:
        with pytest.raises(ValueError, match=f"chunks=4 does not fit {name}, which has 2 on each rank"):
            made(name, stages_of(layers(4)), 8)
