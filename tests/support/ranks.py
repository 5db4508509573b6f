"""Real ranks for tests: processes in one gloo group that start once, run many functions, and always end.

A server imports torch once and forks the ranks, so that even a test that breaks its ranks can have new ones.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = 20.0  # seconds that gloo waits for a message
PRELOADED = ["pytest", "tests.support.warm_up", __name__]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank: a value, or an error, or the end of the process."""

    rank: int
    seconds: float = 0.0
    value: Any = None
    error: str = ""  # the class of an exception that was raised
    text: str = ""  # its message
    traceback: str = ""
    died: str = ""  # how the process ended, or that it did not come back

    @property
    def failed(self) -> bool:
        return bool(self.error or self.died)

    def __str__(self) -> str:
        end = self.died or self.error or "ended well"
        return f"----- rank {self.rank}: {end}, after {self.seconds:.1f} s\n{self.traceback}"


class RanksError(AssertionError):
    """A function failed on some rank; the message has the traceback of each."""


class Ranks:
    """A number of processes in one gloo group."""

    def __init__(self, world: int, group_timeout: float = GROUP_TIMEOUT) -> None:
        self.world = world
        self.group_timeout = group_timeout
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._stacks: list[Path] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
        """`function(rank, *args)` on every rank: its values. If it fails on any, all tracebacks are shown."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        if any(outcome.failed for outcome in outcomes):
            self.close()  # the group may be of no use now
            raise RanksError("\n".join(map(str, outcomes)))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Outcome]:
        """The same, where failures are expected. A rank that does not come back in time is killed."""
        if not self._processes:
            self._start()
        start = time.monotonic()
        work = pickle.dumps((function, args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(work)
        found: dict[int, Outcome] = {}
        while len(found) < self.world and time.monotonic() < start + timeout:
            self._collect(found, start, max(0.0, start + timeout - time.monotonic()))
        for rank in set(range(self.world)) - set(found):
            stack = self._stack_of(rank)
            found[rank] = Outcome(rank, timeout, died=f"did not come back within {timeout:g} s", traceback=stack)
        if any(outcome.died for outcome in found.values()):
            self.close()
        return [found[rank] for rank in range(self.world)]

    def _collect(self, found: dict[int, Outcome], start: float, patience: float) -> None:
        waiting = {rank: self._pipes[rank] for rank in range(self.world) if rank not in found}
        ready = connection.wait(list(waiting.values()), patience)
        for rank, pipe in waiting.items():
            if pipe not in ready:
                continue
            seconds = time.monotonic() - start
            try:
                found[rank] = Outcome(rank, seconds, **pickle.loads(pipe.recv_bytes()))
            except (EOFError, OSError):
                process = self._processes[rank]
                process.join(5)
                found[rank] = Outcome(rank, seconds, died=f"its process ended with code {process.exitcode}")

    def _stack_of(self, rank: int) -> str:
        """Where a rank that hangs is."""
        process = self._processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._stacks[rank].read_text()

    def _start(self) -> None:
        port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world):
            mine, its = _context.Pipe()
            stack = Path(self._folder.name) / f"stack of rank {rank}"
            args = (rank, self.world, port, self.group_timeout, its, str(stack))
            process = _context.Process(target=_serve, args=args, daemon=True, name=f"rank {rank}")
            process.start()
            its.close()
            stack.touch()
            self._processes.append(process)
            self._pipes.append(mine)
            self._stacks.append(stack)

    def close(self) -> None:
        """End all processes: those that wait for work by themselves, the others by force."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes, self._stacks = [], [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serve(rank: int, world: int, port: int, timeout: float, pipe: connection.Connection, stack: str) -> None:
    """The life of a rank: join the group, then do what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        with _group(rank, world, port, timeout):
            while True:
                try:
                    work = pipe.recv_bytes()
                except EOFError:
                    return
                pipe.send_bytes(pickle.dumps(_done(rank, work)))


@contextlib.contextmanager
def _group(rank: int, world: int, port: int, timeout: float) -> Iterator[None]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout))
    yield
    # A rank whose connections are broken cannot say goodbye to the others: it just goes.
    os._exit(0)


def _done(rank: int, work: bytes) -> dict[str, Any]:
    try:
        torch.manual_seed(0)
        function, args = pickle.loads(work)
        return {"value": function(rank, *args)}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
