"""Forwards only: evaluation and inference."""

from __future__ import annotations

from ..action import Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .turns import passes


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
