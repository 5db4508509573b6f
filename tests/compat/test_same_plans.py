"""The same order of computations as torch.distributed.pipelining, wherever its plans are right."""

from __future__ import annotations

import pytest

from pipecut.errors import PlanError
from pipecut.schedule.plan import Plan
from pipecut.schedule.registry import plan_for
from tests.support.sampling import sampled

pytestmark = pytest.mark.upstream

RANKS = range(1, 9)
MICROBATCHES = (1, 2, 3, 4, 6, 7, 9, 16, 17, 24)
ONE_CHUNK = ("GPipe", "1F1B")
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS")


def _chunks(name: str, ranks: int) -> tuple[int, ...]:
    if name in INTERLEAVED:
        return (2, 3, 4) if ranks <= 3 else (2,)
    return (1,) if name in ONE_CHUNK else (2,)


SETTINGS = [
    (name, ranks, chunks)
    for name in (*ONE_CHUNK, *INTERLEAVED, "ZBVZeroBubble", "DualPipeV")
    for ranks in RANKS
    for chunks in _chunks(name, ranks)
]


def _order_of_upstream(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, ranks, microbatches, chunks)
    return [
        [repr(action) for action in row if action is not None and "REDUCE_GRAD" not in repr(action)] for row in rows
    ]


def _order(plan: Plan) -> list[list[str]]:
    return [[repr(action) for action in row] for row in plan.actions]


def _refused_by_upstream(name: str, ranks: int, microbatches: int) -> bool:
    """Counts for which it has no plan, though there is one (DualPipeV has none either way)."""
    if name == "1F1B":
        return microbatches < ranks
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return microbatches % max(1, microbatches // ranks) != 0
    return name == "DualPipeV" and microbatches < 2 * ranks


def _mended(name: str, order: list[list[str]]) -> list[list[str]]:
    """Its 1F1B counts the forwards of the last rank from 1: microbatch 0 never runs, and one that is not there does."""
    if name == "1F1B":
        stage = len(order) - 1
        forward = f"{stage}F"
        order[-1] = [
            f"{forward}{int(each.removeprefix(forward)) - 1}" if each.startswith(forward) else each
            for each in order[-1]
        ]
    return order


@pytest.mark.parametrize(("name", "ranks", "chunks"), sampled(SETTINGS, lambda setting: setting[1] == 3))
def test_same_order(name: str, ranks: int, chunks: int) -> None:
    compared = 0
    for microbatches in MICROBATCHES:
        if _refused_by_upstream(name, ranks, microbatches):
            with pytest.raises(ValueError, match="microbatches"):
                _order_of_upstream(name, ranks, microbatches, chunks)
            continue
        theirs = _order_of_upstream(name, ranks, microbatches, chunks)
        plan = plan_for(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
        assert _order(plan) == _mended(name, theirs)
        compared += 1
    assert compared >= 3


def test_its_1f1b_cannot_run_on_the_last_rank() -> None:
    """The day that this fails, `_mended` can go."""
    last = _order_of_upstream("1F1B", 3, 4, 1)[-1]
    assert last == "2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3".split()
    rows = [*_order(plan_for("1F1B", ranks=3, microbatches=4))[:-1], last]
    with pytest.raises(PlanError, match="there is no microbatch 4"):
        Plan.from_actions(rows, microbatches=4).validate()


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_what_it_refuses_has_a_plan(name: str) -> None:
    chunks = 1 if name == "1F1B" else 2
    refused = [
        (ranks, microbatches)
        for ranks in RANKS
        for microbatches in MICROBATCHES
        if _refused_by_upstream(name, ranks, microbatches)
    ]
    assert len(refused) > 10
    for ranks, microbatches in refused:
        plan_for(name, ranks=ranks, chunks=chunks, microbatches=microbatches).validate()
