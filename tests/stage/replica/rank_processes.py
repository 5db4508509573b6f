"""Four processes with gloo between them, started once, that run what the tests give them."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

RANKS = 4
START_TIMEOUT = 60.0


class RankError(AssertionError):
    """Some ranks failed; the message has the traceback of each."""


class RankProcesses:
    """Runs a function on every rank at once. A rank that does not answer in time takes all of them down."""

    def __init__(self) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: Any = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
        """What the function returns on each rank; it is called with these arguments, after the rank's number."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = self._answers(time.monotonic() + timeout)
        failed = {rank: text for rank, (fine, text) in answers.items() if not fine}
        if failed:
            raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return [answers[rank][1] for rank in range(RANKS)]

    def _answers(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < RANKS:
            for rank, pipe in enumerate(self._pipes):
                if rank in answers:
                    continue
                with contextlib.suppress(EOFError):
                    if pipe.poll(0.01):
                        answers[rank] = pipe.recv()
                        continue
                if not self._processes[rank].is_alive() or time.monotonic() > deadline:
                    answers |= {other: (False, "no answer") for other in range(RANKS) if other not in answers}
                    self.stop()
                    break
        return answers

    def _start(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Ranks are copies of one process that has imported all that they need: torch is slow to import.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"tests.stage.replica.{module}" for module in ("pipeline_grid", "wrappers")])
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        ready = self._answers(time.monotonic() + START_TIMEOUT)
        if not all(fine for fine, _ in ready.values()):
            raise RankError(f"the ranks did not start: {ready}")

    def stop(self) -> None:
        """End all processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None


def _serve(rank: int, port: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = (True, function(rank, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
