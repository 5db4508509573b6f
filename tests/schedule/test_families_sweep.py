"""Every schedule in thousands of settings: complete, in order and free of deadlock, lowered and not."""

from __future__ import annotations

import pytest

from pipecut.errors import PlanError
from pipecut.schedule.registry import FAMILIES, plan_for, schedule_names
from tests.support.sampling import sampled

Setting = tuple[int, int, int]  # ranks, chunks, microbatches
RANKS = range(1, 17)
MOST_MICROBATCHES = 64
SHARDED = 13  # every so many settings are lowered in the other ways too


def _chunks(name: str) -> tuple[int, ...]:
    return (1, 2, 3, 4) if FAMILIES[name].any_chunks else (FAMILIES[name].chunks,)


def _microbatches(ranks: int, chunks: int) -> list[int]:
    """Every count for few stages, otherwise counts around those at which a schedule changes its shape."""
    stages = ranks * chunks
    if stages <= 10:
        return [*range(1, 25), 33, MOST_MICROBATCHES - 1, MOST_MICROBATCHES]
    around = {1, ranks // 2, ranks - 1, ranks, ranks + 1}
    if stages <= 32:
        around |= {2 * ranks - 1, 2 * ranks, 2 * ranks + 1}
    if stages <= 24:
        around |= {2, ranks + 2, stages - 1, stages, stages + 1}
    if ranks in (11, 16):
        around |= {MOST_MICROBATCHES}
    return sorted(around)


def _settings(name: str) -> list[Setting]:
    return [
        (ranks, chunks, microbatches)
        for ranks in RANKS
        for chunks in _chunks(name)
        for microbatches in _microbatches(ranks, chunks)
        if name != "DualPipeV" or microbatches >= 2 * ranks
    ]


def test_the_sweep_is_wide() -> None:
    settings = {name: _settings(name) for name in schedule_names()}
    assert sum(map(len, settings.values())) >= 5000
    for name, each in settings.items():
        assert {ranks for ranks, _, _ in each} == set(RANKS)
        assert {chunks for _, chunks, _ in each} == set(_chunks(name))
        assert {MOST_MICROBATCHES, MOST_MICROBATCHES - 1} <= {microbatches for _, _, microbatches in each}
        assert len(set(each)) == len(each)


@pytest.mark.parametrize("every", sampled([1, 23], lambda every: every > 1))
@pytest.mark.parametrize("name", schedule_names())
def test_every_setting_is_valid(name: str, every: int) -> None:
    for number, (ranks, chunks, microbatches) in enumerate(_settings(name)[::every]):
        plan = plan_for(name, ranks=ranks, chunks=chunks, microbatches=microbatches).validate()
        assert (plan.ranks, plan.stages, plan.microbatches) == (ranks, ranks * chunks, microbatches)
        plan.lower().validate()
        if number % SHARDED == 0:
            plan.lower(max_held=2, receives="early").validate()
            plan.lower(max_held=2, receives="late").validate()


def test_dualpipe_v_says_what_it_cannot_do() -> None:
    for ranks in RANKS:
        for microbatches in range(1, 2 * ranks):
            with pytest.raises(PlanError, match=f"give {2 * ranks} or more"):
                plan_for("DualPipeV", ranks=ranks, microbatches=microbatches)
