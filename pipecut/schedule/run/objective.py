"""The loss of a microbatch: what loss_fn makes of the output, or the one that the model's own output holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...errors import InputError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
WAYS = (
    "make the schedule with loss_fn=, a function of (output, target) or of the output only; or use a model whose "
    "output holds its loss: as `loss`, as the first of a tuple, or as all there is, one number"
)


class MissingTargetError(InputError, RuntimeError):
    """There is no target for the loss. It is a RuntimeError too, as with the peer."""


@dataclass
class Objective:
    """How the loss is made. A loss_fn that takes one argument gets the output; without loss_fn the model has its own.

    >>> import torch
    >>> two, three = torch.tensor(2.0), torch.tensor(3.0)
    >>> Objective(lambda output: output * 2).loss(two, None, {})
    tensor(4.)
    >>> Objective(lambda output, target: output - target).loss(two, three, {})
    tensor(-1.)
    >>> Objective().loss({"loss": three, "logits": torch.zeros(4, 2)}, None, {})
    tensor(3.)
    """

    loss_fn: Callable[..., Tensor] | None = None
    # Called for an output without a loss, as long as that may mean that a step does not train.
    without_loss: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def is_own(self) -> bool:
        """Whether it is up to the model."""
        return self.loss_fn is None

    @property
    def takes_target(self) -> bool:
        """Whether a target can be passed."""
        return self.loss_fn is not None and _places(self.loss_fn, {})[1] > 1

    def check(self, target: Any, loss_kwargs: Mapping[str, Any], *, training: bool) -> None:
        """Refuse a target that nobody would look at, and a step without the one that is needed."""
        if self.loss_fn is None:
            if training and target is not None:
                raise InputError(f"a training step needs a loss: {WAYS}. There is a target, and no loss_fn to take it")
            return
        least, most = _places(self.loss_fn, loss_kwargs)
        if target is not None and most < 2:
            raise InputError(
                "step() got a target, and loss_fn takes one argument, the output: leave out target=, or give loss_fn "
                "a second parameter"
            )
        if training and target is None and least > 1:
            raise MissingTargetError(
                "step() got no target on the rank of the last stage: pass target=, that of the whole batch; a loss_fn "
                "that needs none takes one argument, the output"
            )

    def loss(self, output: Any, target: Any, loss_kwargs: Mapping[str, Any]) -> Any:
        """The loss of one microbatch; None if there is none, as in an evaluation without a target or labels."""
        if self.loss_fn is None:
            found = own_loss(output)
            if found is None and self.without_loss is not None:
                self.without_loss()
            return found
        if target is not None:
            return self.loss_fn(output, target, **loss_kwargs)
        return self.loss_fn(output, **loss_kwargs) if _places(self.loss_fn, loss_kwargs)[0] < 2 else None

    def checked(self, loss: Any, output: Any, microbatch: int) -> Tensor:
        """A loss that a backward can begin with."""
        if isinstance(loss, Tensor) and loss.dim() == 0 and (loss.is_floating_point() or not self.is_own):
            return loss
        if self.is_own and loss is None:
            raise InputError(f"a training step needs a loss, and {_lack(output)}: {WAYS}")
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        if self.is_own:
            raise InputError(f"the loss in the output of the model is {got} for microbatch {microbatch}: {WAYS}")
        raise InputError(
            f"loss_fn returned {got} for microbatch {microbatch}; it must return one number, a tensor without dims: "
            "take its mean, or its sum with scale_grads=False"
        )


def own_loss(output: Any) -> Any:
    """The loss that an output holds, None if it holds none."""
    if isinstance(output, Tensor):
        return output if _is_number(output) else None
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    first = output[0] if isinstance(output, tuple) and output else None
    return first if _is_number(first) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _lack(output: Any) -> str:
    """In what way an output holds no loss."""
    if isinstance(output, Tensor):
        return f"the output of the model is a tensor of shape {list(output.shape)}"
    kind = type(output).__name__
    has_place = "loss" in output if isinstance(output, Mapping) else hasattr(output, "loss")
    if has_place:
        return f"the output of the model, of type {kind}, has None as its loss (were the labels passed?)"
    return f"the output of the model, of type {kind}, holds none"


def _places(function: Callable[..., Any], loss_kwargs: Mapping[str, Any]) -> tuple[int, float]:
    """How many positional arguments a function needs, and how many it takes, besides those passed by name."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a function in C says nothing of itself
        return 2, 2
    parameters = [each for each in signature.parameters.values() if each.name not in loss_kwargs]
    places = [each for each in parameters if each.kind in _POSITIONAL]
    needed = sum(each.default is inspect.Parameter.empty for each in places)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return 2, float("inf")
    return needed, len(places)
