"""A job that is killed at any moment goes on from a step that was saved completely, and ends as if it had not been."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from tests.support.limits import WORK
from tests.support.sampling import sampled
from tests.training.checkpoint.jobs import assert_same
from tests.training.checkpoint.killed_job import RANKS, STEPS, work


class Lives:
    """A job that is started again and again in one folder, and what it has written down."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folder, self.log = place / "checkpoints", place / "log"
        self.count = 0
        place.mkdir()

    def start(self) -> list[BaseProcess]:
        self.count += 1
        context = multiprocessing.get_context("forkserver")
        given = str(self.folder), str(self.place / f"store{self.count}"), str(self.log)
        processes = [context.Process(target=work, args=(rank, *given)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        return processes

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def states(self) -> list[dict[str, torch.Tensor]]:
        return [torch.load(self.log.with_suffix(f".{rank}.pt"), weights_only=False) for rank in range(RANKS)]

    def check(self, losses: dict[str, str]) -> int:
        """Compare all that was written down with the losses of the job that was not killed; return the resumes."""
        saved = resumes = 0
        for line in self.lines:
            kind, _, rest = line.partition(" ")
            if kind == "resumed":
                # At most one save behind what was begun, and never behind what was complete.
                assert saved <= int(rest) <= saved + 4, self.lines
                assert int(rest) % 2 == 0
                saved, resumes = int(rest), resumes + 1
            elif kind == "saved":
                saved = int(rest)
            elif kind == "loss":
                step, _, loss = rest.partition(" ")
                assert losses[step] == loss, f"step {step} of {self.lines}"
        return resumes


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(WORK)
        assert process.exitcode is not None
        process.close()


def uninterrupted(place: Path) -> tuple[dict[str, str], list[dict[str, torch.Tensor]], float]:
    """The losses by step and the states at the end of a job that is not killed, and the seconds of its steps."""
    lives = Lives(place)
    processes = lives.start()
    while not lives.lines:
        time.sleep(0.01)
    start = time.monotonic()
    end(processes)
    seconds = time.monotonic() - start
    lines = [line.split() for line in lives.lines]
    return {line[1]: line[2] for line in lines if line[0] == "loss"}, lives.states, seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "seed"),
    sampled([(2, 0), *((10, seed) for seed in range(1, 5))], lambda case: case[0] == 2, lambda case: True),
)
def test_a_job_that_is_killed_goes_on(kills: int, seed: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.training.checkpoint.killed_server"])
    losses, states, seconds = uninterrupted(tmp_path / "plain")
    assert len(losses) == STEPS
    chance = random.Random(seed)
    killed = resumes = jobs = 0
    lives = Lives(tmp_path / "0")
    while killed < kills or "done" not in lives.lines:
        if "done" in lives.lines:
            jobs += 1
            lives = Lives(tmp_path / str(jobs))
        before = len(lives.lines)
        processes = lives.start()
        if killed < kills:
            while len(lives.lines) == before and all(process.is_alive() for process in processes):
                time.sleep(0.005)  # it is about to train
            time.sleep(chance.uniform(0, seconds))
            doomed = processes if chance.random() < 0.5 else [chance.choice(processes)]
            living = [process for process in doomed if process.is_alive()]
            for process in living:
                process.kill()
            killed += bool(living)
        end(processes)
        if "done" in lives.lines:
            resumes += lives.check(losses)
            for one, other in zip(lives.states, states, strict=True):
                assert_same(one, other)
    print(f"{killed} kills, {resumes} starts of {jobs + 1} jobs")
