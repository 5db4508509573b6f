"""1F1B: one backward for every forward, as soon as the first can run."""

from __future__ import annotations

from ..action import Action, Op
from ..placement import Placement, positive
from ..plan import Plan
from ..rules import Dataflow
from .building import passes, rounds_of, through_chunks, turns


def one_f_one_b(ranks: int, microbatches: int) -> Plan:
    """As long as GPipe, but rank r keeps only `ranks - r` microbatches (arXiv 1806.03377, 2104.04473).

    >>> print(one_f_one_b(ranks=3, microbatches=4).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   0B0 0F3 0B1 ·   0B2 ·   0B3
    rank 1 │ ·   1F0 1F1 ·   1B0 1F2 1B1 1F3 1B2 ·   1B3 ·
    rank 2 │ ·   ·   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 ·   ·
    """
    positive(ranks=ranks, microbatches=microbatches)
    rows = tuple(_one_f_one_b_row(rank, min(ranks - rank, microbatches), microbatches) for rank in range(ranks))
    return Plan("1F1B", Placement.loop(ranks), microbatches, rows, Dataflow.chain(ranks))


def _one_f_one_b_row(rank: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    forwards = passes(rank, Op.FORWARD, range(microbatches))
    backwards = passes(rank, Op.FULL_BACKWARD, range(microbatches))
    return (*turns(warm_up, forwards), *turns(microbatches - warm_up, backwards, forwards), *backwards)


# MERGED: Interleaved 1F1B: several chunks a rank, so that the pipeline fills and drains in smaller steps.


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """1F1B over chunks: a round of about `ranks` microbatches goes through all chunks of a rank (arXiv 2104.04473).

    >>> print(interleaved_one_f_one_b(ranks=2, microbatches=4).grid())
    rank 0 │ 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ·   2B2 ·   2B3 0B2 0B3
    rank 1 │ ·   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ·
    """
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = Placement.loop(ranks, chunks)
    rounds = rounds_of(ranks, microbatches)
    rows = tuple(_interleaved_row(rank, placement, rounds) for rank in range(ranks))
    return Plan("Interleaved1F1B", placement, microbatches, rows, Dataflow.chain(placement.stages))


def _interleaved_row(rank: int, placement: Placement, rounds: tuple[range, ...]) -> tuple[Action, ...]:
    stages = placement.stages_of[rank]
    forwards = through_chunks(stages, Op.FORWARD, rounds)
    backwards = through_chunks(reversed(stages), Op.FULL_BACKWARD, rounds)
    total = len(stages) * rounds[-1].stop
    # The first round must have come to the last chunk; from there to the last rank and back are two steps a rank.
    warm_up = min((len(stages) - 1) * len(rounds[0]) + 2 * (placement.ranks - 1 - rank), total)
    return (*turns(warm_up, forwards), *turns(total - warm_up, forwards, backwards), *backwards)
