"""The words that a schedule is written in: streams of passes, and taking turns among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat

from ..action import Action, Op


def passes(stage: int, op: Op, microbatches: Iterable[int]) -> Iterator[Action]:
    """One pass of a stage for every microbatch, to be taken one after the other.

    >>> list(passes(2, Op.FORWARD, range(3)))
    [2F0, 2F1, 2F2]
    """
    return map(Action, repeat(stage), repeat(op), microbatches)


def turns(rounds: int, *streams: Iterator[Action]) -> Iterator[Action]:
    """So many rounds, in each the next pass of every stream in turn; fewer, if the first stream ends before.

    What is not taken stays in the streams.

    >>> forwards, backwards = passes(0, Op.FORWARD, range(4)), passes(0, Op.FULL_BACKWARD, range(4))
    >>> [*turns(2, forwards), *turns(2, forwards, backwards), *backwards]
    [0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3]
    """
    return chain.from_iterable(zip(*(islice(stream, rounds) for stream in streams), strict=False))
