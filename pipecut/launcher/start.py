"""Starts the process of a rank: a new one, or a fork of this one where a new one could not find the function."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

import torch

from .meeting import Call, Meeting
from .rank import environment_of, run_rank
from .watch import LaunchError


class Starter:
    """Knows how the ranks of one launch are started.

    A new process imports the function by its name, which the functions of a notebook and of a prompt, lambdas and
    inner functions do not have. A fork has them. But it does not work with a device that was used before, and has to
    do with one thread.
    """

    def __init__(self, call: Call, meeting: Meeting, env: Mapping[str, str] | None) -> None:
        self.call = call
        self.meeting = meeting
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.env = {**threads, **(env or {})}
        self.forks = self._why_not_new() is not None and self._may_fork()

    def process(self, rank: int) -> BaseProcess:
        """The process of a rank, before its start."""
        context: Any = multiprocessing.get_context("fork" if self.forks else "spawn")
        args = (rank, self.meeting, self.call if self.forks else None)
        process: BaseProcess = context.Process(target=run_rank, args=args, name=f"rank {rank}")
        return process

    def start(self, rank: int, process: BaseProcess) -> None:
        """Start it in its environment, which what it imports may read at once."""
        with patch.dict(os.environ, {**self.env, **environment_of(rank, self.meeting.ranks)}):
            process.start()

    def _why_not_new(self) -> str | None:
        """Why a new process would not find the call; it is left for the ranks if it would."""
        try:
            self.meeting.leave_call(self.call)
        except Exception as error:
            return f"it, or one of its arguments, cannot be sent to a new process ({error})"
        if self.meeting.call_mentions("__main__") and not _has_file(sys.modules["__main__"]):
            return "a new process cannot import what was defined in a notebook or at a prompt"
        return None

    def _may_fork(self) -> bool:
        obstacle = None
        if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
            obstacle = "this system does not allow it"
        elif _used_accelerator():
            obstacle = f"{_used_accelerator()} is in use here already"
        if obstacle is None:
            return True
        name = name_of(self.call[0])
        raise LaunchError(
            f"launch() cannot start {name}: {self._why_not_new()}; and this process cannot be forked, for {obstacle}. "
            f"Put {name} at the top level of a module, and import it from there"
        )


def name_of(function: object) -> str:
    """A function's name for messages; a partial is called by what it wraps."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else name_of(getattr(function, "func", type(function)))


def _has_file(main: Any) -> bool:
    """Whether the main module is a script or a module, which ranks can import."""
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def _used_accelerator() -> str | None:
    """The kind of device that this process has begun to use."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or not torch.get_device_module(device).is_initialized():
        return None
    return device.type
