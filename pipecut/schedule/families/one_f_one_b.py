"""1F1B: one backward for every forward, as soon as the first can run."""

from __future__ import annotations

from ..action import Action, Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .turns import passes, turns


def one_f_one_b(ranks: int, microbatches: int) -> Plan:
    """As long as GPipe, but rank r keeps only `ranks - r` microbatches (arXiv 1806.03377, 2104.04473).

    >>> print(one_f_one_b(ranks=3, microbatches=4).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   0B0 0F3 0B1 ·   0B2 ·   0B3
    rank 1 │ ·   1F0 1F1 ·   1B0 1F2 1B1 1F3 1B2 ·   1B3 ·
    rank 2 │ ·   ·   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 ·   ·
    """
    positive(ranks=ranks, microbatches=microbatches)
    rows = tuple(_row(rank, min(ranks - rank, microbatches), microbatches) for rank in range(ranks))
    return Plan("1F1B", Placement.loop(ranks), microbatches, rows, Dataflow.chain(ranks))


def _row(rank: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    forwards = passes(rank, Op.FORWARD, range(microbatches))
    backwards = passes(rank, Op.FULL_BACKWARD, range(microbatches))
    return (*turns(warm_up, forwards), *turns(microbatches - warm_up, backwards, forwards), *backwards)
