"""1F1B with the backward in two: weight gradients held back for the time when nothing else can run."""

from __future__ import annotations

from collections.abc import Iterator

from ..action import Action
from .turns import turns


def with_late_weights(
    total: int,
    forwards: Iterator[Action],
    inputs: Iterator[Action],
    weights: Iterator[Action],
    *,
    warm_up: int,
    delay: int,
) -> tuple[Action, ...]:
    """One rank's row: `warm_up` forwards, then 1F1B with the weight gradients `delay` input gradients behind.

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
