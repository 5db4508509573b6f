"""Whole jobs on meshes: clipping, mixed precision, and checkpoints that go on under other copies, shards and parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import pipecut
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training import hybrid_job as jobs
from tests.training.hybrid_job import Job, Wrap, make_job
from tests.training.test_hybrid import BOTH, DATA_PARALLEL, TENSOR_PARALLEL

pytestmark = pytest.mark.distributed

LIMIT = 0.05  # of the norm, well below that of all gradients
Layout = tuple[Mapping[str, int], str, Wrap, bool]  # sizes of the mesh, schedule, wrapper, traced


def optimizers_of(job: Job) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return (
        torch.optim.AdamW(job.schedule.parameters(), lr=0.01),
        torch.optim.AdamW(job.whole.parameters(), lr=0.01),
    )


def train(job: Job, optimizers: tuple[torch.optim.Optimizer, ...], seeds: range) -> None:
    """Steps with clipping of the job and of the whole model, which have equal norms and parameters after each."""
    for seed in seeds:
        tokens = job.batch(seed)
        job.whole_step(seed)
        job.step(seed)
        wanted = nn.utils.clip_grad_norm_(job.whole.parameters(), LIMIT)
        found = pipecut.clip_grad_norm_(job.schedule, LIMIT)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
        assert len(tokens) == job.replicas * jobs.SAMPLES
        job.check_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        job.check_values(1e-7)  # where Adam divides a gradient that is nearly zero by itself, rounding shows


def begin(rank: int, layout: Layout, folder: Path) -> None:
    sizes, schedule, wrap, traced = layout
    job = make_job(sizes, schedule, wrap, traced=traced)
    optimizers = optimizers_of(job)
    train(job, optimizers, range(2))
    pipecut.save_checkpoint(folder, job.schedule, optimizers[0], step=2)
    if rank == 0:
        torch.save([job.whole.state_dict(), optimizers[1].state_dict()], folder / "whole.pt")


def go_on(rank: int, layout: Layout, folder: Path) -> None:
    sizes, schedule, wrap, traced = layout
    job = make_job(sizes, schedule, wrap, traced=traced, seed=1)
    optimizers = optimizers_of(job)
    assert pipecut.load_checkpoint(folder, job.schedule, optimizers[0]).step == 2
    model, state = torch.load(folder / "whole.pt")
    job.whole.load_state_dict(model)
    optimizers[1].load_state_dict(state)
    job.check_values(1e-7)
    train(job, optimizers, range(2, 4))


SHARDED: Layout = (DATA_PARALLEL, "1F1B", jobs.sharded, True)
PARALLEL: Layout = (TENSOR_PARALLEL, "ZBVZeroBubble", jobs.parallel_ends, True)
BY_HAND: Layout = (TENSOR_PARALLEL, "1F1B", jobs.parallel_ends, False)
COPIED: Layout = (DATA_PARALLEL, "Interleaved1F1B", jobs.copied, True)
REPLICATED: Layout = (DATA_PARALLEL, "1F1B", jobs.replicated_by_fsdp, True)


@pytest.mark.slow
def test_a_sharded_job_goes_on_with_tensor_parallel_layers(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(begin, SHARDED, tmp_path)
    four_ranks.run(go_on, PARALLEL, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    sampled(
        [(PARALLEL, COPIED), (COPIED, SHARDED), (REPLICATED, PARALLEL), (SHARDED, REPLICATED), (BY_HAND, BY_HAND)],
        lambda layouts: layouts not in ((COPIED, SHARDED), (REPLICATED, PARALLEL)),
        lambda layouts: True,
    ),
)
def test_jobs_that_go_on_under_another_layout(four_ranks: Ranks, tmp_path: Path, first: Layout, second: Layout) -> None:
    four_ranks.run(begin, first, tmp_path)
    four_ranks.run(go_on, second, tmp_path)


@pytest.mark.slow
def test_a_job_of_eight_ranks_goes_on_with_four(four_ranks: Ranks, tmp_path: Path) -> None:
    with Ranks(8) as eight_ranks:
        eight_ranks.run(begin, (BOTH, "1F1B", jobs.parallel_and_sharded, True), tmp_path)
    four_ranks.run(go_on, PARALLEL, tmp_path)


# ------------------------------------------------------------------------------------------------------ mixed precision


def sharded_in_bfloat16(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    return jobs.sharded(module, mesh, mp_policy=policy)


def parallel_and_sharded_in_bfloat16(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return sharded_in_bfloat16(jobs.parallel_ends(module, mesh), mesh)


def lower_precision(rank: int, sizes: Mapping[str, int], schedule: str, wrap: Wrap, autocast: bool) -> Any:
    """Gradients of lower precision near those of the whole model, in float32 parameters, and clipped by their norm."""
    job = make_job(sizes, schedule, wrap, traced=False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        job.step()
    job.whole_step()
    job.check_gradients(0.03)
    wanted = nn.utils.get_total_norm([each.grad for each in job.whole.parameters() if each.grad is not None])
    found = pipecut.clip_grad_norm_(job.schedule, LIMIT)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0)
    dtypes = {parameter.grad.dtype for parameter in job.schedule.parameters() if parameter.grad is not None}
    assert dtypes == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", sampled(["1F1B", "ZBVZeroBubble"], lambda name: name == "ZBVZeroBubble", lambda name: True)
)
@pytest.mark.parametrize(
    ("sizes", "wrap", "autocast"),
    [
        (DATA_PARALLEL, sharded_in_bfloat16, False),
        ({"dp": 1, **TENSOR_PARALLEL}, parallel_and_sharded_in_bfloat16, False),
        (DATA_PARALLEL, jobs.sharded, True),
        (DATA_PARALLEL, jobs.copied, True),
        (TENSOR_PARALLEL, jobs.parallel_ends, True),
    ],
)
def test_mixed_precision(
    four_ranks: Ranks, sizes: Mapping[str, int], schedule: str, wrap: Wrap, autocast: bool
) -> None:
    four_ranks.run(lower_precision, sizes, schedule, wrap, autocast)


def scaled(rank: int, sizes: Mapping[str, int], schedule: str, wrap: Wrap, traced: bool) -> list[float]:
    """A scaler on a mesh beside torch's own for the whole model, which doubles gradients and halves them exactly."""
    job = make_job(sizes, schedule, wrap, traced=traced)
    optimizers = optimizers_of(job)
    options = {"init_scale": 2.0**8, "growth_interval": 1}
    scaler = pipecut.GradScaler(job.schedule, check_autocast=False, **options)  # type: ignore[arg-type]
    whole_scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    scales = []
    for seed in range(3):
        tokens = job.batch(seed)
        whole_scaler.scale(jobs.next_words(job.whole(tokens), tokens)).backward()  # type: ignore[no-untyped-call]
        job.step(seed)
        if seed == 1:  # an infinity in the last parameter of the last block, on one rank only
            infinite = "blocks.3.down.bias"
            job.whole.get_parameter(infinite).grad.fill_(torch.inf)  # type: ignore[union-attr]
            grad: Any = job.named()[infinite].grad if infinite in job.named() else None
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            if local is not None and (is_last_part(job) or not hasattr(grad, "to_local")):
                local.fill_(torch.inf)
        scaler.unscale_(optimizers[0])
        whole_scaler.unscale_(optimizers[1])
        if seed != 1:
            job.check_gradients()
            wanted = nn.utils.clip_grad_norm_(job.whole.parameters(), LIMIT)
            torch.testing.assert_close(pipecut.clip_grad_norm_(job.schedule, LIMIT), wanted, rtol=1e-10, atol=0)
        for each, optimizer in zip((scaler, whole_scaler), optimizers, strict=True):
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        job.check_values(1e-7)
        assert scaler.get_scale() == whole_scaler.get_scale()
        scales.append(scaler.get_scale())
    return scales


def is_last_part(job: Job) -> bool:
    """True on the last of the ranks that hold parts or copies of the same stages."""
    names = [name for name in job.mesh.mesh_dim_names or () if name != "pp"]
    return all(job.mesh.get_local_rank(name) == job.mesh[name].size() - 1 for name in names)


@pytest.mark.parametrize(
    ("sizes", "schedule", "wrap", "traced"),
    [
        pytest.param(TENSOR_PARALLEL, "1F1B", jobs.parallel_ends, False, marks=pytest.mark.slow),
        pytest.param(DATA_PARALLEL, "1F1B", jobs.sharded, True, marks=pytest.mark.slow),
        pytest.param(DATA_PARALLEL, "Interleaved1F1B", jobs.copied, True, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(TENSOR_PARALLEL, "ZBVZeroBubble", jobs.parallel_ends, True, marks=pytest.mark.slow),
        pytest.param(
            {"dp": 1, **TENSOR_PARALLEL},
            "1F1B",
            jobs.parallel_and_sharded,
            True,
            marks=[pytest.mark.slow, pytest.mark.long],
        ),
    ],
)
def test_a_gradient_scaler(
    four_ranks: Ranks, sizes: Mapping[str, int], schedule: str, wrap: Wrap, traced: bool
) -> None:
    assert four_ranks.run(scaled, sizes, schedule, wrap, traced) == [[512.0, 256.0, 512.0]] * 4


@pytest.mark.slow
def test_a_gradient_scaler_on_eight_ranks() -> None:
    with Ranks(8) as eight_ranks:
        scales = eight_ranks.run(scaled, BOTH, "1F1B", jobs.parallel_and_sharded, True)
    assert scales == [[512.0, 256.0, 512.0]] * 8


# --------------------------------------------------------------------------------------------------------------- seeds


class Dropped(jobs.Part):
    """A part with dropout on values that tensor-parallel ranks all have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


def with_dropout(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.__class__ = Dropped
    return jobs.parallel_ends(module, mesh)


def seeds_of_its_own(rank: int) -> list[str]:
    """Seeds that differ along tp, which are an error on every rank; then one seed, and one rank that draws more."""
    job = make_job(TENSOR_PARALLEL, "1F1B", with_dropout, traced=False)
    told = []
    for seed, drawn in ((rank, 0), (7, 0), (7, int(rank == 1))):
        torch.manual_seed(seed)
        torch.rand(drawn)
        try:
            job.step()
            told.append("trained")
        except pipecut.StepError as error:
            told.append(str(error))
            assert all(each.grad is None for each in job.schedule.parameters()) or len(told) > 1
    return told


@pytest.mark.slow
def test_seeds_that_differ_between_tensor_parallel_ranks(four_ranks: Ranks) -> None:
    """Dropout differed between the parts of one value, and nothing said so."""
    for first, second, third in four_ranks.run(seeds_of_its_own):
        for told in (first, third):
            assert "by tensor parallelism began this step with different random numbers" in told
            assert "call torch.manual_seed() with the same number on all of them" in told
        assert second == "trained"


def without_random_numbers(rank: int) -> None:
    """A step with other seeds on each rank, in modules that draw nothing."""
    job = make_job(TENSOR_PARALLEL, "1F1B", jobs.parallel_ends, traced=False)
    torch.manual_seed(rank)
    job.step()
    job.whole_step()
    job.check_gradients(1e-7)


def test_seeds_of_modules_that_draw_nothing_may_differ(four_ranks: Ranks) -> None:
    """Modules cut by hand were taken to be random: without any dropout, other seeds along tp were an error."""
    four_ranks.run(without_random_numbers)


def seeds_of_one_pipeline(rank: int) -> tuple[str, str]:
    """Seeds that differ along tp in the first of two pipelines only; and then, with numbers by process, anywhere."""
    told = []
    for kind in (None, "per_process"):
        job = make_job(BOTH, "1F1B", with_dropout_and_copies, traced=False, random_numbers=kind)
        torch.manual_seed(rank if job.mesh.get_local_rank("dp") == 0 else 100)
        try:
            job.step()
            told.append("trained")
        except pipecut.StepError as error:
            told.append(str(error))
    return told[0], told[1]


def with_dropout_and_copies(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return jobs.sharded(with_dropout(module, mesh), mesh)


@pytest.mark.slow
def test_seeds_that_differ_in_one_of_two_pipelines_are_an_error_in_both() -> None:
    """The copies had agreed before the seeds were compared: their step() returned, and their optimizers stepped."""
    with Ranks(8) as eight_ranks:
        for told, by_process in eight_ranks.run(seeds_of_one_pipeline):
            assert "began this step with different random numbers" in told
            assert "pass random_numbers='per_process' to the schedule" in told
            assert by_process == "trained"
