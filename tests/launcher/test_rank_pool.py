"""The ranks of these tests: they report failures with their tracebacks, and none of them is left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.limits import WORK
from tests.support.ranks import Ranks, RanksError

pytestmark = pytest.mark.distributed


def summed(rank: int, number: int) -> float:
    tensor = torch.tensor(float(rank + number))
    dist.all_reduce(tensor)
    return tensor.item()


def break_on(rank: int, which: int) -> int:
    if rank == which:
        raise ValueError(f"rank {rank} is asked to fail")
    return os.getpid()


def end_on(rank: int, which: int) -> None:
    if rank == which:
        os._exit(3)


def hang_on(rank: int, which: int) -> None:
    if rank == which:
        time.sleep(10 * WORK)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_run_one_function_after_the_other() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(summed, 1) == [3.0, 3.0]
        assert ranks.run(summed, 2) == [5.0, 5.0]
        pids = ranks.run(break_on, -1)
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


def test_failures_of_ranks_are_reported_and_leave_no_process() -> None:
    with Ranks(2) as ranks:
        pids = ranks.run(break_on, -1)
        with pytest.raises(RanksError, match=r"rank 0: ended well[\s\S]*rank 1: ValueError[\s\S]*, in break_on"):
            ranks.run(break_on, 1)
        assert not any(alive(pid) for pid in pids)
        with pytest.raises(RanksError, match="rank 1: it ended with exit code 3 before"):
            ranks.run(end_on, 1)
        with pytest.raises(RanksError, match=r"rank 0: did not return within 1 s[\s\S]*in hang_on"):
            ranks.run(hang_on, 0, timeout=1.0)
        assert ranks.run(summed, 1) == [3.0, 3.0]
