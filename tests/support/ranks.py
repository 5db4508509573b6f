"""Ranks for tests: a warm pool of local ranks, whose functions get the rank's number and the same random numbers.

A server imports torch once and forks the ranks, so that even a test that breaks its ranks can have new ones.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipecut.launcher.pool import RankPool
from pipecut.launcher.rank import Outcome as Outcome
from tests.support.limits import WORK

GROUP_TIMEOUT = 2 * WORK  # seconds that gloo waits for a message: a rank that waits for that hangs

multiprocessing.get_context("forkserver").set_forkserver_preload(["pytest", "tests.support.warm_up", __name__])


class RanksError(AssertionError):
    """A function failed on some rank; the message has the traceback of each."""


class Ranks:
    """A number of processes in one gloo group, which start with the first call."""

    def __init__(self, world: int, group_timeout: float = GROUP_TIMEOUT) -> None:
        self.world = world
        self._pool = RankPool(world, start_method="forkserver", group_timeout=group_timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = WORK) -> list[Any]:
        """`function(rank, *args)` on every rank: its values. If it fails on any, all tracebacks are shown."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        if any(outcome.failed for outcome in outcomes):
            raise RanksError("\n".join(map(str, outcomes)))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = WORK) -> list[Outcome]:
        """The same, where failures are expected. A rank that does not come back in time is killed."""
        return self._pool.outcomes(_call, function, args, timeout=timeout)

    def close(self) -> None:
        """End all processes; the next call has new ones."""
        self._pool.stop()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return function(dist.get_rank(), *args)
