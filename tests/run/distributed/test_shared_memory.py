"""Ranks on one host: by shared memory unless they are asked to use their process group, and with the same errors."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, PlannedSchedule, Schedule1F1B, ScheduleGPipe
from pipecut.errors import StepError
from pipecut.schedule import plan_for
from tests.run.distributed import failure_cases as cases
from tests.run.distributed.failing_models import Party, fail, nth
from tests.run.distributed.training_cases import check_schedule
from tests.support.limits import PATIENCE
from tests.support.ranks import GROUP_TIMEOUT, Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed

SHORT = 4.0 * PATIENCE  # seconds that a rank waits for one that is stopped
VARIABLE, GROUP, MEMORY = "PIPECUT_TRANSPORT", "DistributedTransport", "SharedMemoryTransport"


def over_process_group(rank: int, case: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "process_group")
        return case(rank, *args)


def inner_transport(schedule: Any) -> Any:
    (timed,) = schedule._connection.transports
    return timed.transport


def transport_of(schedule: Any) -> str:
    return type(inner_transport(schedule)).__name__


def names_of_transports(rank: int, options: list[str | None], variable: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, variable if rank == 0 else "")
        party = Party(rank, 2, traced=False)
        schedule = party.schedule(transport=options[rank])
        for _ in range(2):
            schedule.step(*party.args, target=party.target)
        return transport_of(schedule)


@pytest.mark.parametrize(
    ("options", "variable", "name"),
    [
        ([None, None], "", MEMORY),
        ([None, "shared_memory"], "", MEMORY),
        (["process_group", "process_group"], "", GROUP),
        ([None, "process_group"], "", GROUP),
        ([None, None], "process_group", GROUP),
        (["shared_memory", None], "process_group", MEMORY),
    ],
)
def test_ranks_use_shared_memory_unless_one_of_them_is_asked_not_to(
    two_ranks: Ranks, options: list[str | None], variable: str, name: str
) -> None:
    assert two_ranks.run(names_of_transports, options, variable) == [name, name]


def test_shared_memory_that_is_asked_for_and_refused_is_an_error_on_all_ranks(two_ranks: Ranks) -> None:
    for outcome in two_ranks.outcomes(names_of_transports, ["shared_memory", "process_group"], ""):
        assert outcome.error == "DisagreementError"
        assert 'transport="shared_memory" was asked for on rank 0, and is not possible' in outcome.text
        assert "rank 1: it was asked to use the process group" in outcome.text


@pytest.mark.parametrize("option", ["tcp", ""])
def test_a_name_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setenv(VARIABLE, "tcp")
    name = "transport=" if option else f"{VARIABLE}="
    with pytest.raises(
        Exception, match=f'{name}"tcp" is not known: pass a function .* or "process_group" or "shared_m'
    ):
        Schedule1F1B([PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")], 2, transport=option or None)


@pytest.mark.parametrize(
    "name", sampled(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"], lambda name: name == "Interleaved1F1B")
)
def test_gradients_over_the_process_group(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(over_process_group, check_schedule, 2, name, True, [5])


FAILURES = [
    (cases.fails_in_forward, (2, False, 1, "1F1B"), "rank 1 failed in 1F2 (stage 1, microbatch 2), in module 'inner'"),
    (cases.is_killed, (2, False, 1, "backward_trap"), "rank 0 lost its connection to rank 1 in"),
    (cases.calls, (2, False, "NaN"), "rank 1 failed after its last action: pipecut.errors.PipeError: the loss is NaN"),
    (cases.swaps_schedules, (2, False), "rank 0 called step() of schedule 1, and this rank step() of schedule 2"),
]


@pytest.mark.parametrize(("case", "args", "told"), FAILURES)
def test_failures_over_the_process_group(case: Callable[..., Any], args: tuple[Any, ...], told: str) -> None:
    with Ranks(2) as ranks:
        for outcome in ranks.outcomes(over_process_group, case, *args):
            assert outcome.died or (outcome.error == "StepError" and told in outcome.text), outcome


class Wide(nn.Module):
    """Makes of a few numbers an activation of many megabytes, or a few numbers of it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3 * 1024 * 1024) * (rank + 1))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.weight if self.rank == 0 else (x * self.weight).mean(1)


def send_much(rank: int) -> None:
    """24 MB go each way for each of six microbatches: more than may be on their way at a time."""
    parts = [Wide(0), Wide(1)]
    x = torch.arange(12.0).view(12, 1)
    loss = sum(F.mse_loss(parts[1](parts[0](each)), each[:, 0]) for each in x.split(2)) / 6
    loss.backward()
    expected = parts[rank].weight.grad
    parts[rank].zero_grad(set_to_none=True)
    schedule = ScheduleGPipe(PipelineStage(parts[rank], rank, 2, "cpu"), 6, F.mse_loss)
    for _ in range(2):
        parts[rank].zero_grad(set_to_none=True)
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x[:, 0]} if rank == 1 else {}))
        torch.testing.assert_close(parts[rank].weight.grad, expected)
    assert transport_of(schedule) == MEMORY


def test_parcels_larger_than_any_buffer(two_ranks: Ranks) -> None:
    two_ranks.run(send_much)


def make_many_schedules(rank: int) -> None:
    party = Party(rank, 2, traced=False)
    party.x, party.y = party.x.repeat(2000, 1), party.y.repeat(2000, 1)  # too large for the socket alone

    def use(options: dict[str, Any]) -> int:
        schedule = party.schedule(**options)
        schedule.step(*party.args, target=party.target)
        return id(inner_transport(schedule).channels)

    first = party.schedule()
    first.step(*party.args, target=party.target)
    same = id(inner_transport(first).channels)
    assert [use({"timeout": 300.0 + nth}) for nth in range(3)] == [same] * 3
    first.step(*party.args, target=party.target)
    gc.collect()  # what others have left on this rank is not counted
    before = len(os.listdir("/proc/self/fd"))
    del first
    gc.collect()
    dist.barrier()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    for _ in range(20):
        use({})
    gc.collect()
    dist.barrier()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert "memfd:pipecut" not in Path("/proc/self/maps").read_text()


def test_schedules_of_a_group_share_its_channels_and_leave_nothing(two_ranks: Ranks) -> None:
    two_ranks.run(make_many_schedules)


def stops(rank: int, where: str) -> None:
    """Rank 1 is stopped in the middle of a step until rank 0 has given up."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule(timeout=SHORT)
    schedule.step(*party.args, target=party.target)
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    if inner := party.inner(1):
        setattr(inner, where, nth(2, lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    try:
        schedule.step(*party.args, target=party.target)
    finally:
        if rank == 0:
            os.kill(processes[1], signal.SIGCONT)


@pytest.mark.parametrize("where", ["forward_trap", "backward_trap"])
def test_a_rank_that_is_stopped(where: str) -> None:
    with Ranks(2) as ranks:
        for outcome in ranks.outcomes(stops, where):
            assert outcome.error == "StepError", outcome
            assert "rank 0 timed out waiting for rank 1 in 0B2 (stage 0, microbatch 2)" in outcome.text
            assert (
                f" for {SHORT:g} s: rank 0 is in step() of schedule 1, its call 2; rank 1 does not answer"
                in outcome.text
            )


def begins_anew(rank: int, folder: Path) -> str:
    party = Party(rank, 2, traced=False)
    if inner := party.inner(1):
        inner.forward_trap = nth(2, fail)
    old = party.schedule()
    with pytest.raises(StepError, match="this layer fails on purpose"):
        old.step(*party.args, target=party.target)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "new"), 2), rank=rank, world_size=2)
    stages = [PipelineStage(stage.submod, stage.stage_index, 2, "cpu") for stage in party.stages]
    schedule = PlannedSchedule(stages, plan_for("1F1B", ranks=2, microbatches=4), F.mse_loss)
    schedule.step(*party.args, target=party.target)
    return transport_of(schedule)


def test_a_new_group_after_a_failure(tmp_path: Path) -> None:
    with Ranks(2, GROUP_TIMEOUT) as ranks:
        assert ranks.run(begins_anew, tmp_path) == [MEMORY, MEMORY]
