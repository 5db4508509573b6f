"""A job that goes on under another number of ranks, and another cut, ends with the bits of one that never stopped."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipecut import latest_checkpoint, load_checkpoint, save_checkpoint
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training.checkpoint.jobs import Job, assert_same, joined, make_job
from tests.training.checkpoint.rank_cases import job_of_first_ranks

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
COUNTS = range(1, 7)
QUICK = {(1, 3, "1F1B"), (4, 2, "GPipe"), (2, 1, "Interleaved1F1B"), (3, 3, "1F1B")}
CASES = [(before, after, name) for name in SCHEDULES for before in COUNTS for after in COUNTS]


def is_long(case: tuple[int, int, str]) -> bool:
    """Return False for some cases with each number of ranks before and after."""
    before, after, name = case
    return (before + 2 * after + SCHEDULES.index(name)) % 6 > 0


@functools.cache
def uninterrupted(ranks: int, name: str) -> Job:
    job = make_job(ranks, name)
    job.train(0, 6)
    job.end = job.state  # type: ignore[attr-defined]
    return job


@pytest.mark.parametrize(("before", "after", "name"), sampled(CASES, lambda case: case in QUICK, is_long))
def test_a_job_goes_on_under_another_number_of_ranks(before: int, after: int, name: str, tmp_path: Path) -> None:
    expected = uninterrupted(after, name)
    first = make_job(before, name)
    first.train(0, 3)
    save_checkpoint(tmp_path, first.schedule, first.optimizer, step=3, scheduler=first.scheduler)
    job = make_job(after, name)
    torch.manual_seed(99)
    loaded = load_checkpoint(tmp_path, job.schedule, job.optimizer, scheduler=job.scheduler)
    assert (loaded.step, loaded.path) == (3, latest_checkpoint(tmp_path))
    job.train(3, 6)
    assert first.losses + job.losses == expected.losses
    assert first.norms + job.norms == expected.norms
    assert_same(job.state, expected.end)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def six_ranks() -> Iterator[Ranks]:
    with Ranks(6) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("before", COUNTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_job_of_processes_goes_on_under_any_other_number(
    before: int, name: str, six_ranks: Ranks, tmp_path: Path
) -> None:
    saved = six_ranks.run(functools.partial(job_of_first_ranks, loads=False), before, name, str(tmp_path))
    for after in COUNTS:
        expected = uninterrupted(after, name)
        went_on = six_ranks.run(functools.partial(job_of_first_ranks, loads=True), after, name, str(tmp_path))
        parts = [part for part in went_on if part is not None]
        assert len(parts) == after
        for losses, norms, _ in parts:
            assert saved[0][0] + losses == expected.losses
            assert saved[0][1] + norms == expected.norms
        assert_same(joined([state for *_, state in parts]), expected.end)  # type: ignore[attr-defined]
