"""The split of a small stage: all gradients at once, those of the parameters held back until they are asked for.

Where a weight's gradient takes no longer than to find it in the graph and to put it off, that would gain nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .engine import accumulate
from .pending import PendingWeights
from .starts import Gradients, Receivers, Starts, take_gradients


def hold_gradients(
    starts: Starts, inputs: Sequence[Any], receivers: Receivers, parameters: Sequence[Tensor]
) -> tuple[Gradients, PendingWeights]:
    """Run the full backward with the parameters' `.grad` put aside; afterwards it is as it was."""
    before = _exchange(parameters, itertools.repeat(None))
    try:
        accumulate(starts.outputs, starts.gradients)
    finally:
        held = _exchange(parameters, before)
    return take_gradients(inputs, receivers), PendingWeights(functools.partial(_add, parameters, held))


def _exchange(parameters: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Give each parameter another `.grad`, and return what it was."""
    found = []
    for parameter, gradient in zip(parameters, gradients, strict=False):
        found.append(parameter.grad)
        parameter.grad = gradient
    return found


def _add(parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
    """Add to `.grad` as autograd does: the first gradient becomes it, later ones are added in place."""
    sums, terms = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        before = parameter.grad
        if before is None:
            parameter.grad = gradient
        elif before.is_sparse or before.requires_grad:
            accumulate((parameter,), (gradient,))
        else:
            sums.append(before)
            terms.append(gradient)
    if sums:
        torch._foreach_add_(sums, terms)
