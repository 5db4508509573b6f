"""ZBVZeroBubble and DualPipeV: two stages on each rank, down the ranks and up again in a V."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ...errors import PlanError
from ..action import Action, CodedRow, Op, Rows, decoded, overlap
from ..registry import schedule
from ..rules import Placement
from .building import passes, turns


@schedule("ZBVZeroBubble", placement=Placement.v, chunks=2, forbids_compiled=True)
def _zero_bubble_v(placement: Placement, microbatches: int) -> Rows:
    """Run two stages on each rank, in a V, with weight gradients in the bubbles.

    This is ZB-V of arXiv 2401.10241: no rank holds more than `ranks` microbatches. From 2 * ranks - 1 microbatches on
    no rank waits between its first pass and its last, if F, I and W take equally long.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("ZBVZeroBubble", ranks=2, microbatches=4).grid())
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ·
    rank 1 │ ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """
    ranks = placement.ranks
    # The phases below need so many microbatches; with fewer, the passes of the others are left out.
    planned = max(microbatches, 2 * ranks - 1)
    rows = [_zero_bubble_row(rank, ranks, planned) for rank in range(ranks)]
    if planned > microbatches:
        wanted = set(range(microbatches))
        return tuple(tuple(action for action in row if action and action.microbatch in wanted) for row in rows)
    return tuple(rows)


def _zero_bubble_row(rank: int, ranks: int, microbatches: int) -> CodedRow:
    every = range(microbatches)
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    F0, I0, W0 = (passes(rank, op, every) for op in ops)  # on the way down
    F1, I1, W1 = (passes(2 * ranks - 1 - rank, op, every) for op in ops)  # on the way up
    below = ranks - 1 - rank  # ranks between this one and the turn of the V
    codes = chain(
        # Fill: forwards go down and come up again, the first backwards come down.
        turns(2 * below + 1, F0),
        turns(rank, F1, F0),
        turns(below + 1, F1, I1, W1),
        # Both chunks in turn, first with new microbatches, then without.
        turns(microbatches - 2 * ranks + 1 + rank, F0, I0, W0, F1, I1, W1),
        turns(below, I0, W0, F1, I1, W1),
        # Drain: input gradients first, for others wait for them.
        turns(rank, I0, I1),
        turns(below + 1, I0, W0),
        W1,
        W0,
    )
    return CodedRow(codes)


@schedule("DualPipeV", placement=Placement.v, chunks=2, forbids_compiled=True)
def _dualpipe_v(placement: Placement, microbatches: int) -> Rows:
    """Run two stages on each rank, in a V, forwards and backwards overlapped.

    This is DualPipe (arXiv 2412.19437) cut in half: the transfers of one pass hide behind the other of its pair.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("DualPipeV", ranks=2, microbatches=4).grid(width=90))
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B
    rank 1 │ ·   1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B
    <BLANKLINE>
    rank 0 │ 3B2                  (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
    rank 1 │ (2F3;1B1)OVERLAP_F_B 2B2                  1B2 2I3 1I3 2W3 1W3
    """
    ranks = placement.ranks
    if microbatches < placement.stages:
        raise PlanError(
            f"DualPipeV on {ranks} ranks cannot run {microbatches} microbatches: give {placement.stages} or more, "
            "at least one for each of its stages, or take ZBVZeroBubble, which runs any number."
        )
    return tuple(_dualpipe_row(rank, ranks, microbatches) for rank in range(ranks))


def _dualpipe_row(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * ranks - 1 - rank
    below, upto = ranks - 1 - rank, rank + 1  # ranks after this one, ranks up to this one
    every = range(microbatches)
    F0, F1 = _actions(passes(down, Op.FORWARD, every)), _actions(passes(up, Op.FORWARD, every))
    # The first backwards (of chunk 1) and the last come in two, so that their weight gradients fill what would be idle.
    B0 = _backwards(down, every, first=0, last=below + (upto + 1) // 2)
    B1 = _backwards(up, every, first=below, last=upto // 2)
    W1 = _actions(passes(up, Op.BACKWARD_WEIGHT, every))
    F0_B1, F1_B0 = map(overlap, F0, B1), map(overlap, F1, B0)

    fill = (*turns(2 * below, F0), *turns(upto, F0, F1), *turns(below, B1, W1, F1))
    # On the last rank the first backward follows from the forward before it, so the first pair is none.
    meet = () if below else tuple(turns(1, F0, B1, F1_B0))
    both = tuple(turns(microbatches, F0_B1, F1_B0))
    last_forwards = tuple(turns(below, B1, F1_B0))
    backwards = (*turns(upto, B1, B0), *B0)
    weights = map(_weight_of, backwards[upto:])
    ahead = 2 * upto  # backwards before weight gradients are needed to fill the waits
    return (
        *fill,
        *meet,
        *both,
        *last_forwards,
        *backwards[:ahead],
        *turns(below, weights, iter(backwards[ahead:])),
        *weights,
    )


def _backwards(stage: int, microbatches: range, *, first: int, last: int) -> Iterator[Action]:
    """Full backwards, but only the input gradient for the first and the last microbatches."""
    whole = len(microbatches) - last
    codes = chain(
        passes(stage, Op.BACKWARD_INPUT, microbatches[:first]),
        passes(stage, Op.FULL_BACKWARD, microbatches[first:whole]),
        passes(stage, Op.BACKWARD_INPUT, microbatches[whole:]),
    )
    return _actions(codes)


def _actions(codes: Iterator[int]) -> Iterator[Action]:
    """Return the actions themselves, for overlaps have no codes."""
    return (action for action in map(decoded, codes) if action is not None)


def _weight_of(backward: Action) -> Action:
    return Action(backward.stage, Op.BACKWARD_WEIGHT, backward.microbatch)
