"""Rounds of microbatches, the order in which interleaved schedules go through their chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..action import Action, Op


def rounds_of(ranks: int, microbatches: int) -> tuple[range, ...]:
    """The microbatches in rounds of about one a rank, as even as can be.

    The larger rounds come first: the warm-up is as long as the first round, and must be long enough for all.

    >>> rounds_of(ranks=4, microbatches=8), rounds_of(ranks=4, microbatches=9)
    ((range(0, 4), range(4, 8)), (range(0, 5), range(5, 9)))
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return tuple(map(range, starts, starts[1:]))


def through_chunks(stages: Iterable[int], op: Op, rounds: Iterable[range]) -> Iterator[Action]:
    """A rank's passes of one kind: each round through all of its stages, in the order in which they are given.

    >>> list(through_chunks([0, 2], Op.FORWARD, rounds_of(ranks=2, microbatches=4)))
    [0F0, 0F1, 2F0, 2F1, 0F2, 0F3, 2F2, 2F3]
    """
    order = tuple(stages)
    return (Action(stage, op, microbatch) for together in rounds for stage in order for microbatch in together)
