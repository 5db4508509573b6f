"""ZB-H1, ZB-H2 and InterleavedZeroBubble: 1F1B with weight gradients that fill idle slots (arXiv 2401.10241)."""

from __future__ import annotations

from ..action import CodedRow, Op, Rows
from ..registry import schedule
from ..rules import Placement
from .building import passes, rounds_of, through_chunks, with_late_weights


@schedule("ZB-H1")
def _zero_bubble_h1(placement: Placement, microbatches: int) -> Rows:
    """Run 1F1B with weight gradients in its bubbles, and no more memory.

    If F, I and W take equally long, it has a third of the bubble of 1F1B: rank r holds r weight gradients back.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("ZB-H1", ranks=3, microbatches=4).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 │ ·   1F0 1F1 ·   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    ranks = placement.ranks
    return tuple(_row(rank, microbatches, warm_up=ranks - rank, delay=rank) for rank in range(ranks))


@schedule("ZB-H2")
def _zero_bubble_h2(placement: Placement, microbatches: int) -> Rows:
    """Run without a bubble, for twice the memory of 1F1B.

    From 2 * ranks - 1 microbatches on no rank waits between its first pass and its last, if F, I and W take equally
    long.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("ZB-H2", ranks=3, microbatches=5).grid())
    rank 0 │ 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 ·   ·
    rank 1 │ ·   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4 ·
    rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """
    ranks = placement.ranks
    # Few microbatches do not fill the warm-up: weight gradients held back longer would only lengthen the end.
    spare = max(0, microbatches - ranks)
    return tuple(
        _row(rank, microbatches, warm_up=2 * (ranks - rank) - 1, delay=rank + min(rank, spare)) for rank in range(ranks)
    )


def _row(rank: int, microbatches: int, *, warm_up: int, delay: int) -> CodedRow:
    every = range(microbatches)
    streams = (passes(rank, op, every) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    return CodedRow(with_late_weights(microbatches, *streams, warm_up=warm_up, delay=delay))


@schedule("InterleavedZeroBubble", chunks=2, any_chunks=True, forbids_compiled=True)
def _interleaved_zero_bubble(placement: Placement, microbatches: int) -> Rows:
    """Run interleaved 1F1B with weight gradients in its bubbles.

    Rank r runs r input gradients ahead of its weight gradients, as in ZB-H1.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("InterleavedZeroBubble", ranks=2, microbatches=2).grid())
    rank 0 │ 0F0 0F1 2F0 2F1 ·   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1 │ ·   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    rounds = rounds_of(placement.ranks, microbatches)
    return tuple(_interleaved_row(rank, placement, rounds) for rank in range(placement.ranks))


def _interleaved_row(rank: int, placement: Placement, rounds: tuple[range, ...]) -> CodedRow:
    stages = placement.stages_of[rank]
    row = with_late_weights(
        len(stages) * rounds[-1].stop,
        through_chunks(stages, Op.FORWARD, rounds),
        through_chunks(reversed(stages), Op.BACKWARD_INPUT, rounds),
        through_chunks(reversed(stages), Op.BACKWARD_WEIGHT, rounds),
        warm_up=(len(stages) - 1) * len(rounds[0]) + placement.ranks - rank,
        delay=rank,
    )
    return CodedRow(row)
