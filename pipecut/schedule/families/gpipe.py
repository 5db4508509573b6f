"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from ..action import Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .turns import passes


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
