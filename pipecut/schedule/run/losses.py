"""The losses of a step: their mean, told to ranks that do not have them, and NaN among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import InputError, PipeError
from .weighing import as_integer, from_integer

NUMBERS = 2  # how many integers tell the mean: the count of losses, and the bits of their mean


class LossesError(InputError, TypeError):
    """What is to be filled with losses is no list. It is a TypeError too, as with the peer."""


@dataclass(frozen=True)
class Losses:
    """The losses of the last step by microbatch, none on ranks without the last stage; and the weights of all."""

    of: Mapping[int, Tensor] = field(default_factory=dict)
    weights: Sequence[float] = ()

    def in_order(self) -> list[Tensor]:
        """Those of microbatch 0, 1, 2..."""
        return [self.of[number] for number in sorted(self.of)]

    def total(self, scaled: bool) -> float:
        """The loss of the whole batch: the mean by weight, or the sum of losses that are not scaled."""
        whole = sum(self.weights)
        # One without weight may be the mean of nothing.
        counted = {number: loss.item() for number, loss in self.of.items() if self.weights[number] or not scaled}
        return sum(loss * (self.weights[number] / whole if scaled else 1.0) for number, loss in counted.items())

    def told(self, scaled: bool) -> list[int]:
        """Integers for `mean_from` on other ranks."""
        return [len(self.of), as_integer(self.total(scaled))]

    def refuse_nan(self, scaled: bool) -> None:
        """Gradients of such a loss are of no use."""
        losses = self.in_order()
        if losses and bool(torch.stack([loss.float() for loss in losses]).isnan().any()):
            counted = [number for number in sorted(self.of) if self.weights[number] or not scaled]
            numbers = [number for number in counted if bool(self.of[number].isnan())]
            if numbers:
                raise PipeError(
                    f"the loss is NaN for microbatches {numbers}: the gradients of this step are of no use. Pass "
                    "check_loss=False to the schedule if something else, such as a gradient scaler, looks after that"
                )


def mean_from(numbers: Sequence[int]) -> float:
    """The loss of the whole batch, from what the rank of the last stage has told.

    >>> mean_from(Losses({0: torch.tensor(1.0), 1: torch.tensor(4.0)}, weights=[2, 1]).told(scaled=True))
    2.0
    """
    count, bits = numbers
    if not count:
        raise InputError("there is no loss yet: call step(), or eval() with a target or labels, before mean_loss()")
    return from_integer(bits)
