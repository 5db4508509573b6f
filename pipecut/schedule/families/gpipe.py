"""GPipe, LoopedBFS and ForwardOnly: every stage runs all microbatches in one go."""

from __future__ import annotations

from itertools import chain

from ..action import Op, Rows
from ..codes import CodedRow
from ..placement import Placement
from ..registry import schedule
from .building import passes


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
