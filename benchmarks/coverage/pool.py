"""Trials in processes of their own: a crash, a leak or an endless loop of one model stays its own affair."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .kinds import Kind
from .trial import Outcome, Trial, try_model

BYTES = 4 * 2**30  # a model that does not get by with this is not tiny
PATIENCE = 60  # times the limit, in seconds that pass: a busy or stopped machine is no fault of the model's


@dataclass(frozen=True)
class Job:
    """One model to try."""

    kind: Kind
    config_class: type[Any]
    model_class: type[Any]


def run_jobs(
    jobs: Sequence[Job], *, stages: int, schedule: str, at_once: int, seconds: float, with_upstream: bool = False
) -> Iterator[Trial]:
    """The trials as they finish. Processes are forked, so that transformers is imported once.

    The limit for one model is in seconds of its process, not of the clock.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(jobs), dict[Connection, tuple[Any, Job, float]]()
    trained: set[Connection] = set()
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(theirs, job, stages, schedule, seconds, with_upstream), daemon=True
            )
            process.start()
            theirs.close()
            running[ours] = (process, job, time.monotonic() + PATIENCE * seconds)
        ready = wait(list(running), timeout=0.5)
        late = [connection for connection, (_, _, limit) in running.items() if time.monotonic() > limit]
        for connection in {*ready, *late}:
            if connection in ready and connection not in trained and _says_that_it_trains(connection):
                trained.add(connection)
                continue
            process, job, _ = running.pop(connection)
            yield _result(connection, job, process, seconds, connection in trained)


def _says_that_it_trains(connection: Any) -> bool:
    """Whether the next message is not the result yet. What is not, is put back for `_result`."""
    try:
        message = connection.recv()
    except EOFError:
        return False
    if isinstance(message, Trial):
        _RESULTS[connection] = message
    return message == TRAINS


def _result(connection: Any, job: Job, process: Any, seconds: float, trained: bool) -> Trial:
    if connection in _RESULTS:
        trial = _RESULTS.pop(connection)
        _end(process, connection)
        return trial
    outcome: Outcome = "error" if trained else "not uncut"
    try:
        if connection.poll():
            result: Trial = connection.recv()
            _end(process, connection)
            return result
        cause = f"hangs: no result after {PATIENCE * seconds:.0f} s"
    except EOFError:
        process.join()
        out_of_time = process.exitcode == -signal.SIGXCPU
        cause = f"took more than {seconds:.0f} CPU s" if out_of_time else f"the process died ({process.exitcode})"
    _end(process, connection)
    return Trial(job.kind.name, job.model_class.__name__, outcome, cause)


def _end(process: Any, connection: Any) -> None:
    process.kill()
    process.join()
    connection.close()


TRAINS = "trains uncut"
_RESULTS: dict[Any, Trial] = {}


def _run(connection: Any, job: Job, stages: int, schedule: str, seconds: float, with_upstream: bool) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what models print about themselves would tear the table apart
        os.dup2(silence, stream)
    tell = functools.partial(connection.send, TRAINS)
    trial = try_model(job.kind, job.config_class, job.model_class, stages, schedule, tell, with_upstream=with_upstream)
    connection.send(trial)
    connection.close()
