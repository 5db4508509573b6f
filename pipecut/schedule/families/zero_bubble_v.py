"""ZBV: two chunks a rank in a V, no bubble with the memory of 1F1B."""

from __future__ import annotations

from ..action import Action, Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .turns import passes, turns


def zero_bubble_v(ranks: int, microbatches: int) -> Plan:
    """ZB-V of arXiv 2401.10241: no rank holds more than `ranks` microbatches.

    From 2 * ranks - 1 microbatches on no rank waits between its first pass and its last, if F, I and W take equally
    long.

    >>> print(zero_bubble_v(ranks=2, microbatches=4).grid())
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ·
    rank 1 │ ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """
    positive(ranks=ranks, microbatches=microbatches)
    placement = Placement.v(ranks)
    # The phases below need so many microbatches; with fewer, the passes of the others are left out.
    planned = max(microbatches, 2 * ranks - 1)
    rows = tuple(_row(rank, ranks, planned) for rank in range(ranks))
    if planned > microbatches:
        wanted = set(range(microbatches))
        rows = tuple(tuple(action for action in row if action.microbatch in wanted) for row in rows)
    return Plan("ZBVZeroBubble", placement, microbatches, rows, Dataflow.chain(placement.stages))


def _row(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    every = range(microbatches)
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    F0, I0, W0 = (passes(rank, op, every) for op in ops)  # on the way down
    F1, I1, W1 = (passes(2 * ranks - 1 - rank, op, every) for op in ops)  # on the way up
    below = ranks - 1 - rank  # ranks between this one and the turn of the V
    return (
        # Fill: forwards go down and come up again, the first backwards come down.
        *turns(2 * below + 1, F0),
        *turns(rank, F1, F0),
        *turns(below + 1, F1, I1, W1),
        # Both chunks in turn, first with new microbatches, then without.
        *turns(microbatches - 2 * ranks + 1 + rank, F0, I0, W0, F1, I1, W1),
        *turns(below, I0, W0, F1, I1, W1),
        # Drain: input gradients first, for others wait for them.
        *turns(rank, I0, I1),
        *turns(below + 1, I0, W0),
        *W1,
        *W0,
    )
