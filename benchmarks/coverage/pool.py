"""Trials in processes of their own: a crash, a leak or an endless loop of one model stays its own affair."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .kinds import Kind
from .trial import Trial, try_model

BYTES = 4 * 2**30  # a model that does not get by with this is not tiny


@dataclass(frozen=True)
class Job:
    """One model to try."""

    kind: Kind
    config_class: type[Any]
    model_class: type[Any]


def run_jobs(jobs: Sequence[Job], *, stages: int, schedule: str, at_once: int, seconds: float) -> Iterator[Trial]:
    """The trials as they finish. Processes are forked, so that transformers is imported once."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(jobs), dict[Connection, tuple[Any, Job, float]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, job, stages, schedule), daemon=True)
            process.start()
            theirs.close()
            running[ours] = (process, job, time.monotonic() + seconds)
        ready = wait(list(running), timeout=0.5)
        late = [connection for connection, (_, _, limit) in running.items() if time.monotonic() > limit]
        for connection in {*ready, *late}:
            process, job, _ = running.pop(connection)
            yield _result(connection, job, process, seconds)


def _result(connection: Any, job: Job, process: Any, seconds: float) -> Trial:
    try:
        if connection.poll():
            trial: Trial = connection.recv()
            return trial
        return Trial(job.kind.name, job.model_class.__name__, "error", f"took longer than {seconds:.0f} s")
    except EOFError:
        process.join()
        return Trial(job.kind.name, job.model_class.__name__, "error", f"the process died ({process.exitcode})")
    finally:
        process.kill()
        process.join()
        connection.close()


def _run(connection: Any, job: Job, stages: int, schedule: str) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what models print about themselves would tear the table apart
        os.dup2(silence, stream)
    connection.send(try_model(job.kind, job.config_class, job.model_class, stages, schedule))
    connection.close()
