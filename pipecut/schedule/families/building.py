"""Phrases that schedules are written in: streams of passes, turns among them, rounds through the chunks of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat

from ..action import Action, Op


def passes(stage: int, op: Op, microbatches: Iterable[int]) -> Iterator[Action]:
    """Return one pass of a stage for every microbatch, in order.

    >>> list(passes(2, Op.FORWARD, range(3)))
    [2F0, 2F1, 2F2]
    """
    return map(Action, repeat(stage), repeat(op), microbatches)


def turns(rounds: int, *streams: Iterator[Action]) -> Iterator[Action]:
    """Take the next pass of every stream in turn, so many rounds; fewer if the first stream ends before.

    The passes that are not taken stay in the streams.

    >>> forwards, backwards = passes(0, Op.FORWARD, range(4)), passes(0, Op.FULL_BACKWARD, range(4))
    >>> [*turns(2, forwards), *turns(2, forwards, backwards), *backwards]
    [0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3]
    """
    return chain.from_iterable(zip(*(islice(stream, rounds) for stream in streams), strict=False))


def with_late_weights(
    total: int,
    forwards: Iterator[Action],
    inputs: Iterator[Action],
    weights: Iterator[Action],
    *,
    warm_up: int,
    delay: int,
) -> tuple[Action, ...]:
    """Return one rank's row: `warm_up` forwards, then 1F1B with weight gradients `delay` input gradients behind.

    warm_up=2, delay=1, total=4      F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    """
    warm_up, delay = min(warm_up, total), min(delay, total)
    steady = total - warm_up
    ahead = min(delay, steady)  # input gradients that run ahead while there are forwards
    return (
        *turns(warm_up, forwards),
        *turns(ahead, inputs, forwards),
        *turns(steady - ahead, inputs, weights, forwards),
        *turns(delay - ahead, inputs),
        *turns(total, inputs, weights),
        *weights,
    )


def rounds_of(ranks: int, microbatches: int) -> tuple[range, ...]:
    """Divide the microbatches into rounds of about one per rank, as evenly as possible.

    The larger rounds come first: the warm-up is as long as the first round, and must be long enough for all.

    >>> rounds_of(ranks=4, microbatches=8), rounds_of(ranks=4, microbatches=9)
    ((range(0, 4), range(4, 8)), (range(0, 5), range(5, 9)))
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return tuple(map(range, starts, starts[1:]))


def through_chunks(stages: Iterable[int], op: Op, rounds: Iterable[range]) -> Iterator[Action]:
    """Return a rank's passes of one kind: each round through all of its stages, in the given order.

    >>> list(through_chunks([0, 2], Op.FORWARD, rounds_of(ranks=2, microbatches=4)))
    [0F0, 0F1, 2F0, 2F1, 0F2, 0F3, 2F2, 2F3]
    """
    order = tuple(stages)
    return (Action(stage, op, microbatch) for together in rounds for stage in order for microbatch in together)
