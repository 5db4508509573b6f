"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from ..action import Action, Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .building import passes


def gpipe(ranks: int, microbatches: int) -> Plan:
    """Every rank keeps all microbatches until the first backward (arXiv 1811.06965).

    >>> print(gpipe(ranks=3, microbatches=3).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   ·   ·   0B0 0B1 0B2
    rank 1 │ ·   1F0 1F1 1F2 ·   ·   1B0 1B1 1B2 ·
    rank 2 │ ·   ·   2F0 2F1 2F2 2B0 2B1 2B2 ·   ·
    """
    positive(ranks=ranks, microbatches=microbatches)
    every = range(microbatches)
    rows = tuple((*passes(rank, Op.FORWARD, every), *passes(rank, Op.FULL_BACKWARD, every)) for rank in range(ranks))
    return Plan("GPipe", Placement.loop(ranks), microbatches, rows, Dataflow.chain(ranks))


# MERGED: Forwards only: evaluation and inference.


def forward_only(ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """Chunk after chunk, each for all microbatches.

    >>> print(forward_only(ranks=2, microbatches=3, chunks=2).grid())
    rank 0 │ 0F0 0F1 0F2 2F0 2F1 2F2 ·
    rank 1 │ ·   1F0 1F1 1F2 3F0 3F1 3F2
    """
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = Placement.loop(ranks, chunks)
    rows = tuple(
        tuple(forward for stage in stages for forward in passes(stage, Op.FORWARD, range(microbatches)))
        for stages in placement.stages_of
    )
    return Plan("ForwardOnly", placement, microbatches, rows, Dataflow.chain(placement.stages), training=False)


# MERGED: Looped BFS: GPipe over several chunks a rank, breadth first.


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """All microbatches through one chunk before the next, and back the same way (arXiv 2211.05953).

    A rank comes to each chunk's parameters once forward and once backward, which is what sharded ones want.

    >>> print(looped_bfs(ranks=2, microbatches=2).grid())
    rank 0 │ 0F0 0F1 2F0 2F1 ·   ·   2B1 2B0 0B1 0B0
    rank 1 │ ·   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 ·
    """
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = Placement.loop(ranks, chunks)
    rows = tuple(_row(stages, microbatches) for stages in placement.stages_of)
    return Plan("LoopedBFS", placement, microbatches, rows, Dataflow.chain(placement.stages))


def _row(stages: tuple[int, ...], microbatches: int) -> tuple[Action, ...]:
    row: list[Action] = []
    for stage in stages:
        row += passes(stage, Op.FORWARD, range(microbatches))
    for stage in reversed(stages):
        row += passes(stage, Op.FULL_BACKWARD, reversed(range(microbatches)))
    return tuple(row)
