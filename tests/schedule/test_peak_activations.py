"""What the ranks hold: the most activations at a time, from the order of the actions alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecut.schedule.action import Op
from pipecut.schedule.plan import Plan
from pipecut.schedule.registry import FAMILIES
from tests.support.sampling import sampled

HELD = {Op.FORWARD: 1, Op.BACKWARD_INPUT: 0, Op.BACKWARD_WEIGHT: -1, Op.FULL_BACKWARD: -1}
SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 20)]
SIZES += [(ranks, microbatches) for ranks in (16, 32) for microbatches in (1, 7, 16, 31, 32, 33, 70)]


def _peaks(plan: Plan) -> list[int]:
    """The most stages' activations that each rank holds: one more after F, one less after W or B."""
    peaks = []
    for row in plan.actions:
        held = peak = 0
        for action in row:
            for leaf in action.leaves if action is not None else ():
                held += HELD[leaf.op]
                peak = max(peak, held)
        assert held == 0
        peaks.append(peak)
    return peaks


def _microbatches(ranks: int) -> list[int]:
    """All counts until the pipeline is full, and some beyond."""
    if ranks <= 9:
        return [*range(1, 2 * ranks + 3), 4 * ranks + 1]
    return [1, ranks // 3, ranks // 2, ranks, ranks + 1, 2 * ranks + 1]


V_LIMITS: list[tuple[str, Callable[[int], int]]] = [
    ("V-Half", lambda ranks: (ranks + 2) // 2),
    ("V-Min", lambda ranks: (ranks + 4) // 3),
]


@pytest.mark.parametrize(("name", "limit"), V_LIMITS)
@pytest.mark.parametrize("ranks", sampled(range(1, 33), lambda ranks: ranks <= 12))
def test_v_half_and_v_min(name: str, limit: Callable[[int], int], ranks: int) -> None:
    for microbatches in _microbatches(ranks):
        plan = FAMILIES[name].plan(ranks, microbatches)
        assert max(_peaks(plan)) <= 2 * limit(ranks)  # in chunks, of which a rank has two
        plan.validate()


@pytest.mark.parametrize(("name", "limit"), V_LIMITS)
def test_v_half_and_v_min_use_what_they_may(name: str, limit: Callable[[int], int]) -> None:
    for ranks in range(3, 17):
        assert max(_peaks(FAMILIES[name].plan(ranks, 2 * ranks))) == 2 * limit(ranks)


def test_v_half_and_v_min_need_less_than_1f1b() -> None:
    for ranks in range(4, 17):
        of_1f1b, half, least = (
            max(_peaks(FAMILIES[name].plan(ranks, 3 * ranks))) / FAMILIES[name].chunks
            for name in ("1F1B", "V-Half", "V-Min")
        )
        assert least <= half < of_1f1b


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_others(ranks: int, microbatches: int) -> None:
    assert _peaks(FAMILIES["GPipe"].plan(ranks, microbatches)) == [microbatches] * ranks
    assert _peaks(FAMILIES["LoopedBFS"].plan(ranks, microbatches, 3)) == [3 * microbatches] * ranks
    assert _peaks(FAMILIES["1F1B"].plan(ranks, microbatches)) == [
        min(ranks - rank, microbatches) for rank in range(ranks)
    ]
    assert _peaks(FAMILIES["ZB-H1"].plan(ranks, microbatches)) == [min(ranks, microbatches)] * ranks
    assert max(_peaks(FAMILIES["ZB-H2"].plan(ranks, microbatches))) == min(2 * ranks - 1, microbatches)
    assert max(_peaks(FAMILIES["ZBVZeroBubble"].plan(ranks, microbatches))) <= 2 * ranks
