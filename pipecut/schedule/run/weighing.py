"""How much each microbatch counts in the loss of the batch, if that is not its number of samples."""

from __future__ import annotations

import inspect
import math
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import InputError, PipeWarning
from ...pipe_ir.pipe import PipeInfo
from .objective import Objective

LossWeight = Callable[[Any], Any]
Source = Literal["target", "arguments", "keywords"]


@dataclass(frozen=True)
class Weighing:
    """`loss_weight`, and what it is called with.

    That is the target of a microbatch where loss_fn takes one, on the rank of the last stage. A model with a loss of
    its own has its labels among its arguments: a traced one has them on the rank of the first stage, which tells the
    others; modules that were cut by hand among the keywords of the last stage's rank.
    """

    loss_weight: LossWeight
    source: Source

    def of(self, parts: Sequence[Any] | None, *, training: bool = True) -> list[float] | None:
        """The weights of the microbatches; None in an evaluation without the labels that they are made from.

        >>> import torch
        >>> labels = [torch.tensor([[4, -100], [3, 2]]), torch.tensor([[1, -100]])]
        >>> Weighing(lambda target: (target != -100).sum(), "target").of(labels)
        [3.0, 1.0]
        """
        if parts is None:
            if not training:
                return None
            raise InputError("loss_weight is a function of the target here, and step() got none: pass target=")
        try:
            given = [self.loss_weight(part) for part in parts]
        except KeyError as error:
            if self.source == "target":
                raise
            if not training:
                return None
            known = ", ".join(map(repr, parts[0])) or "nothing"
            raise InputError(
                f"loss_weight asked for {error} in the {self.source} of a microbatch, and there is {known}"
            ) from error
        weights = [_number(weight, microbatch) for microbatch, weight in enumerate(given)]
        if not any(weights):
            raise InputError("loss_weight is 0 for every microbatch: the loss of such a batch is not defined")
        return weights

    def refuse_losses_without(self, weights: Sequence[float] | None) -> None:
        """Losses that there are after all, though the labels to weigh them by were not found."""
        if weights is None:
            raise InputError(
                f"there is a loss, and loss_weight did not find what it asks for in the {self.source} of this "
                "evaluation: pass it, or let loss_weight ask for something else"
            )


def weighing_of(
    loss_weight: LossWeight | None, objective: Objective, info: PipeInfo | None, scaled: bool
) -> Weighing | None:
    """The weighing of a schedule, if there is one."""
    if loss_weight is None:
        return None
    if not scaled:
        raise InputError(
            "loss_weight weighs losses that are means, and with scale_grads=False they are sums: leave out one of them"
        )
    own: Source = "keywords" if info is None else "arguments"
    return Weighing(loss_weight, "target" if objective.takes_target else own)


IGNORED = -100  # what torch's losses, and the models that use them, leave out of their mean


def warned_of_uneven_labels(microbatches: Sequence[Mapping[str, Any]]) -> bool:
    """Warn if labels that do not count are spread unevenly: the mean of the microbatches' means is another loss."""
    for name, first in microbatches[0].items():
        if not isinstance(first, Tensor) or first.dtype != torch.int64 or not first.dim():
            continue
        labels = [part[name] for part in microbatches]
        counted = [int((each != IGNORED).sum()) for each in labels]
        if all(count == each.numel() for count, each in zip(counted, labels, strict=True)):
            continue
        shares = {round(count / max(len(each), 1), 9) for count, each in zip(counted, labels, strict=True)}
        if len(shares) > 1:
            warnings.warn(
                f"{name} has {counted} labels that count ({IGNORED} does not) in its microbatches. If the model's loss "
                "is a mean over them, the loss of the batch is not the mean over samples, by which microbatches are "
                f"weighed: pass loss_weight=lambda inputs: (inputs[{name!r}] != {IGNORED}).sum() to the schedule",
                PipeWarning,
                stacklevel=2,
            )
            return True
    return False


def _number(weight: Any, microbatch: int) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(
            f"loss_weight returned {weight!r} for microbatch {microbatch}; it must return a number that is not "
            "negative, such as how many labels count"
        )
    return number


def by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call under the names of the parameters; what goes to `**options` under its own name."""
    named: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        collects = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if collects else {name: value}
    return named


def as_integer(number: float) -> int:
    """The bits of a number, for messages that are integers.

    >>> from_integer(as_integer(0.1))
    0.1
    """
    return int(struct.unpack("q", struct.pack("d", number))[0])


def from_integer(bits: int) -> float:
    """The number with these bits."""
    return float(struct.unpack("d", struct.pack("q", bits))[0])
