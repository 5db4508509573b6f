"""Interleaved zero bubble: interleaved 1F1B with the weight gradients held back."""

from __future__ import annotations

from ..action import Action, Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .late_weights import with_late_weights
from .rounds import rounds_of, through_chunks


def interleaved_zero_bubble(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """Rank r runs r input gradients ahead of its weight gradients, as in ZB-H1 (arXiv 2401.10241).

    >>> print(interleaved_zero_bubble(ranks=2, microbatches=2).grid())
    rank 0 │ 0F0 0F1 2F0 2F1 ·   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1 │ ·   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = Placement.loop(ranks, chunks)
    rounds = rounds_of(ranks, microbatches)
    rows = tuple(_row(rank, placement, rounds) for rank in range(ranks))
    return Plan("InterleavedZeroBubble", placement, microbatches, rows, Dataflow.chain(placement.stages))


def _row(rank: int, placement: Placement, rounds: tuple[range, ...]) -> tuple[Action, ...]:
    stages = placement.stages_of[rank]
    return with_late_weights(
        len(stages) * rounds[-1].stop,
        through_chunks(stages, Op.FORWARD, rounds),
        through_chunks(reversed(stages), Op.BACKWARD_INPUT, rounds),
        through_chunks(reversed(stages), Op.BACKWARD_WEIGHT, rounds),
        warm_up=(len(stages) - 1) * len(rounds[0]) + placement.ranks - rank,
        delay=rank,
    )
