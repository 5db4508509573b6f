"""GPipe, 1F1B and their kin: all microbatches in one go, or one backward for every forward."""

from __future__ import annotations

from itertools import chain

from ..action import CodedRow, Op, Rows
from ..registry import schedule
from ..rules import Placement
from .building import passes, rounds_of, through_chunks, turns


@schedule("GPipe")
def _gpipe(placement: Placement, microbatches: int) -> Rows:
    """Run all forwards, then all backwards.

    Every rank keeps all microbatches until the first backward (arXiv 1811.06965).

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("GPipe", ranks=3, microbatches=3).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   ·   ·   0B0 0B1 0B2
    rank 1 │ ·   1F0 1F1 1F2 ·   ·   1B0 1B1 1B2 ·
    rank 2 │ ·   ·   2F0 2F1 2F2 2B0 2B1 2B2 ·   ·
    """
    every = range(microbatches)
    return tuple(
        CodedRow(chain(passes(rank, Op.FORWARD, every), passes(rank, Op.FULL_BACKWARD, every)))
        for rank in range(placement.ranks)
    )


@schedule("LoopedBFS", chunks=2, any_chunks=True)
def _looped_bfs(placement: Placement, microbatches: int) -> Rows:
    """Run GPipe with several stages on each rank, one stage after the other.

    All microbatches go through one chunk before the next, and back the same way (arXiv 2211.05953). A rank comes to
    each chunk's parameters once forward and once backward, which suits sharded ones.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("LoopedBFS", ranks=2, microbatches=2).grid())
    rank 0 │ 0F0 0F1 2F0 2F1 ·   ·   2B1 2B0 0B1 0B0
    rank 1 │ ·   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 ·
    """
    return tuple(_looped_row(stages, microbatches) for stages in placement.stages_of)


def _looped_row(stages: tuple[int, ...], microbatches: int) -> CodedRow:
    every = range(microbatches)
    forwards = (passes(stage, Op.FORWARD, every) for stage in stages)
    backwards = (passes(stage, Op.FULL_BACKWARD, every[::-1]) for stage in reversed(stages))
    return CodedRow(chain.from_iterable((*forwards, *backwards)))


@schedule("ForwardOnly", any_chunks=True, training=False)
def _forward_only(placement: Placement, microbatches: int) -> Rows:
    """Run forwards only, for evaluation and inference: `step` and `eval` are the same.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("ForwardOnly", ranks=2, microbatches=3, chunks=2).grid())
    rank 0 │ 0F0 0F1 0F2 2F0 2F1 2F2 ·
    rank 1 │ ·   1F0 1F1 1F2 3F0 3F1 3F2
    """
    return tuple(
        CodedRow(chain.from_iterable(passes(stage, Op.FORWARD, range(microbatches)) for stage in stages))
        for stages in placement.stages_of
    )


@schedule("1F1B")
def _one_f_one_b(placement: Placement, microbatches: int) -> Rows:
    """Run one forward, then one backward, as soon as the first backward can run.

    It takes as long as GPipe, but rank r keeps only `ranks - r` microbatches (arXiv 1806.03377, 2104.04473).

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("1F1B", ranks=3, microbatches=4).grid())
    rank 0 │ 0F0 0F1 0F2 ·   ·   0B0 0F3 0B1 ·   0B2 ·   0B3
    rank 1 │ ·   1F0 1F1 ·   1B0 1F2 1B1 1F3 1B2 ·   1B3 ·
    rank 2 │ ·   ·   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 ·   ·
    """
    ranks = placement.ranks
    return tuple(_one_f_one_b_row(rank, min(ranks - rank, microbatches), microbatches) for rank in range(ranks))


def _one_f_one_b_row(rank: int, warm_up: int, microbatches: int) -> CodedRow:
    forwards = passes(rank, Op.FORWARD, range(microbatches))
    backwards = passes(rank, Op.FULL_BACKWARD, range(microbatches))
    return CodedRow(chain(turns(warm_up, forwards), turns(microbatches - warm_up, backwards, forwards), backwards))


@schedule("Interleaved1F1B", chunks=2, any_chunks=True)
def _interleaved_one_f_one_b(placement: Placement, microbatches: int) -> Rows:
    """Run 1F1B with several stages on each rank, in a loop.

    A round of about one microbatch per rank goes through all chunks of a rank (arXiv 2104.04473), so that the pipeline
    fills and drains in smaller pieces.

    >>> from pipecut.schedule import plan_for
    >>> print(plan_for("Interleaved1F1B", ranks=2, microbatches=4).grid())
    rank 0 │ 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ·   2B2 ·   2B3 0B2 0B3
    rank 1 │ ·   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ·
    """
    rounds = rounds_of(placement.ranks, microbatches)
    return tuple(_interleaved_row(rank, placement, rounds) for rank in range(placement.ranks))


def _interleaved_row(rank: int, placement: Placement, rounds: tuple[range, ...]) -> CodedRow:
    stages = placement.stages_of[rank]
    forwards = through_chunks(stages, Op.FORWARD, rounds)
    backwards = through_chunks(reversed(stages), Op.FULL_BACKWARD, rounds)
    total = len(stages) * rounds[-1].stop
    # The first round must have reached the last chunk; from there to the last rank and back are two slots per rank.
    warm_up = min((len(stages) - 1) * len(rounds[0]) + 2 * (placement.ranks - 1 - rank), total)
    return CodedRow(chain(turns(warm_up, forwards), turns(total - warm_up, forwards, backwards), backwards))
