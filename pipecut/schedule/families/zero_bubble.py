"""ZB-H1 and ZB-H2, the two handmade zero bubble schedules with one chunk a rank (arXiv 2401.10241)."""

from __future__ import annotations

from ..action import Action, Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .building import passes, rounds_of, through_chunks, with_late_weights


def zero_bubble_h1(ranks: int, microbatches: int) -> Plan:
    """The memory of 1F1B and, if F, I and W take equally long, a third of its bubble: rank r holds r W back.

    >>> print(zero_bubble_h1(ranks=3, microbatches=4).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 │ ·   1F0 1F1 ·   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    positive(ranks=ranks, microbatches=microbatches)
    rows = tuple(_handcrafted_row(rank, microbatches, warm_up=ranks - rank, delay=rank) for rank in range(ranks))
    return Plan("ZB-H1", Placement.loop(ranks), microbatches, rows, Dataflow.chain(ranks))


def zero_bubble_h2(ranks: int, microbatches: int) -> Plan:
    """Twice the memory of 1F1B, and no bubble.

    From 2 * ranks - 1 microbatches on no rank waits between its first pass and its last, if F, I and W take equally
    long.

    >>> print(zero_bubble_h2(ranks=3, microbatches=5).grid())
    rank 0 │ 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 ·   ·
    rank 1 │ ·   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4 ·
    rank 2 │ ·   ·   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """
    positive(ranks=ranks, microbatches=microbatches)
    # Few microbatches do not fill the warm-up: weight gradients held back longer would only lengthen the end.
    spare = max(0, microbatches - ranks)
    rows = tuple(
        _handcrafted_row(rank, microbatches, warm_up=2 * (ranks - rank) - 1, delay=rank + min(rank, spare))
        for rank in range(ranks)
    )
    return Plan("ZB-H2", Placement.loop(ranks), microbatches, rows, Dataflow.chain(ranks))


def _handcrafted_row(rank: int, microbatches: int, *, warm_up: int, delay: int) -> tuple[Action, ...]:
    every = range(microbatches)
    streams = (passes(rank, op, every) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    return with_late_weights(microbatches, *streams, warm_up=warm_up, delay=delay)


# MERGED: Interleaved zero bubble: interleaved 1F1B with the weight gradients held back.


def interleaved_zero_bubble(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """Rank r runs r input gradients ahead of its weight gradients, as in ZB-H1 (arXiv 2401.10241).

    >>> print(interleaved_zero_bubble(ranks=2, microbatches=2).grid())
    rank 0 │ 0F0 0F1 2F0 2F1 ·   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1 │ ·   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = Placement.loop(ranks, chunks)
    rounds = rounds_of(ranks, microbatches)
    rows = tuple(_interleaved_row(rank, placement, rounds) for rank in range(ranks))
    return Plan("InterleavedZeroBubble", placement, microbatches, rows, Dataflow.chain(placement.stages))


def _interleaved_row(rank: int, placement: Placement, rounds: tuple[range, ...]) -> tuple[Action, ...]:
    stages = placement.stages_of[rank]
    return with_late_weights(
        len(stages) * rounds[-1].stop,
        through_chunks(stages, Op.FORWARD, rounds),
        through_chunks(reversed(stages), Op.BACKWARD_INPUT, rounds),
        through_chunks(reversed(stages), Op.BACKWARD_WEIGHT, rounds),
        warm_up=(len(stages) - 1) * len(rounds[0]) + placement.ranks - rank,
        delay=rank,
    )
