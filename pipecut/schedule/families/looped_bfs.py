"""Looped BFS: GPipe over several chunks a rank, breadth first."""

from __future__ import annotations

from ..action import Action, Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .turns import passes


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
