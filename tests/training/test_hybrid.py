"""Pipelines on meshes: copies, shards and tensor-parallel layers of stages, with the gradients of the uncut model."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pipecut import StepError
from pipecut.errors import ClosedGroupError, DisagreementError, InputError, PipeError
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training import hybrid_job as jobs
from tests.training.hybrid_job import Wrap, make_job

pytestmark = pytest.mark.distributed

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
TENSOR_PARALLEL = {"pp": 2, "tp": 2}
DATA_PARALLEL = {"dp": 2, "pp": 2}
BOTH = {"dp": 2, "pp": 2, "tp": 2}


def train(rank: int, sizes: Mapping[str, int], schedule: str, wrap: Wrap, traced: bool, tied: bool) -> None:
    """Two steps, whose gradients add up, and the loss of each."""
    job = make_job(sizes, schedule, wrap, traced=traced, tied=tied)
    for seed in range(2):
        loss = job.whole_step(seed)
        job.step(seed)
        assert job.schedule.mean_loss() == pytest.approx(loss)
        job.check_gradients()


@pytest.mark.parametrize(
    ("schedule", "traced"),
    [pytest.param("1F1B", True, marks=pytest.mark.slow), ("ZBVZeroBubble", False)],
    ids=["traced", "cut by hand"],
)
def test_tensor_parallel_stages_with_a_tie(four_ranks: Ranks, schedule: str, traced: bool) -> None:
    """The gradient of the table of words is a partial sum at one end, and in shards at the other."""
    four_ranks.run(train, TENSOR_PARALLEL, schedule, jobs.parallel_ends, traced, True)


@pytest.mark.slow
def test_tensor_parallel_and_sharded_stages(four_ranks: Ranks) -> None:
    four_ranks.run(train, {"dp": 1, **TENSOR_PARALLEL}, "ZBVZeroBubble", jobs.parallel_and_sharded, True, True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("sizes", "wrap"),
    [
        (DATA_PARALLEL, jobs.copied),
        (DATA_PARALLEL, jobs.replicated),
        (DATA_PARALLEL, jobs.replicated_by_fsdp),
        (DATA_PARALLEL, jobs.sharded),
        (TENSOR_PARALLEL, jobs.parallel),
        (TENSOR_PARALLEL, jobs.parallel_ends),
    ],
)
def test_every_wrapper(
    four_ranks: Ranks, sizes: Mapping[str, int], wrap: Wrap, schedule: str, traced: bool, tied: bool
) -> None:
    four_ranks.run(train, sizes, schedule, wrap, traced, tied)


@pytest.fixture(scope="module")
def eight_ranks() -> Any:
    with Ranks(8) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("wrap", [jobs.parallel_and_sharded, jobs.parallel_and_replicated])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("traced", [True, False])
def test_three_dims(eight_ranks: Ranks, schedule: str, wrap: Wrap, traced: bool) -> None:
    eight_ranks.run(train, BOTH, schedule, wrap, traced, True)


# ------------------------------------------------------------------------------------------------------ failures in one


def fail(rank: int, schedule: str, place: str) -> tuple[str, float]:
    """A step in which a layer of rank 0 fails in its third microbatch, where rank 1 waits for it in a collective."""
    job = make_job(TENSOR_PARALLEL, schedule, jobs.parallel, traced=False)
    job.step()
    if rank == 0:
        layer = jobs.blocks_of(job.modules[0])[0].norm2
        calls = iter(range(3))

        def burst(*_: Any) -> None:
            if next(calls) == 2:
                raise ValueError("a layer fails on purpose")

        register = layer.register_forward_pre_hook if place == "forward" else layer.register_full_backward_hook
        register(burst)  # type: ignore[operator]
    start = time.monotonic()
    with pytest.raises(StepError) as caught:
        job.step()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("schedule", "place"),
    sampled([("1F1B", "forward"), ("ZBVZeroBubble", "backward")], lambda case: case[1] == "backward"),
)
def test_a_rank_that_fails_ends_the_wait_of_its_tensor_parallel_partner(
    four_ranks: Ranks, schedule: str, place: str
) -> None:
    """The partner waited in the collective for the timeout of its group, which is half an hour by default."""
    for message, _ in four_ranks.run(fail, schedule, place):
        assert "rank 0 failed in 0" in message
        assert "ValueError: a layer fails on purpose" in message


# ------------------------------------------------------------------------------------------- what does not fit together


def parallel_at_one_end(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The table of words in shards where they are looked up, and whole where it is the head."""
    return jobs.parallel_ends(module, mesh) if hasattr(module, "words") else module


def over_the_pipeline(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in jobs.blocks_of(module):
        parallelize_module(block, mesh["pp"], jobs.BLOCK_PLAN)
    return module


def refuse(rank: int, sizes: Mapping[str, int], schedule: str, wrap: Wrap, kind: type[PipeError], tied: bool) -> str:
    with pytest.raises((kind, ClosedGroupError)) as caught:  # the latter on a rank that comes when others have failed
        make_job(sizes, schedule, wrap, traced=False, tied=tied).step()
    return str(caught.value)


def test_a_tied_parameter_that_lies_differently_at_its_ends(four_ranks: Ranks) -> None:
    for message in four_ranks.run(refuse, TENSOR_PARALLEL, "1F1B", parallel_at_one_end, DisagreementError, True):
        assert (
            "tied parameter words.weight of stage 0 (make it alike in all its stages: shape, dtype, and what "
            "parallelize_module and fully_shard do with it): float64[16, 8] as (S(0)) on the mesh (tp=2) on rank 0; "
            "float64[16, 8] on rank 1"
        ) in message


def test_a_tied_parameter_that_lies_differently_in_stages_of_one_rank(four_ranks: Ranks) -> None:
    first, *_ = four_ranks.run(refuse, TENSOR_PARALLEL, "ZBVZeroBubble", parallel_at_one_end, StepError, True)
    assert "is float64[16, 8] as (S(0)) on the mesh (tp=2) in stage 0, and float64[16, 8] in stage 3: make it" in first


def test_layers_made_parallel_over_the_ranks_of_the_pipeline(four_ranks: Ranks) -> None:
    first, *_ = four_ranks.run(refuse, TENSOR_PARALLEL, "1F1B", over_the_pipeline, InputError, False)
    assert first == (
        "stage 0 is made parallel over ranks [0, 2], of which [2] hold other stages of the same pipeline. Give "
        "parallelize_module and distribute_tensor the mesh of the tensor-parallel ranks: for "
        'mesh_dim_names=("pp", "tp") it is mesh["tp"]'
    )


def copied_without_a_check(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(jobs.parallel(module, mesh), process_group=mesh["dp"].get_group(), init_sync=False)


def test_copies_of_tensor_parallel_layers(four_ranks: Ranks) -> None:
    sizes = {"dp": 1, **TENSOR_PARALLEL}
    for wrap in (jobs.parallel_and_replicated_by_ddp, copied_without_a_check):
        for message in four_ranks.run(refuse, sizes, "1F1B", wrap, InputError, False):
            assert re.fullmatch(
                r"\S+, \S+, \S+ and \d+ more are DTensors, which (DistributedDataParallel|replicate\(\)) does not "
                "average: put stages that parallelize_module has divided under fully_shard, with the mesh of the "
                "data-parallel ranks",
                message,
            )
