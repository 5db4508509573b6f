"""Where a backward starts and ends: outputs that pass a gradient on, inputs that receive one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...errors import InputError
from ..microbatch.distributed_tensor import is_distributed
from ..on_mesh import text_of

Gradients: TypeAlias = tuple[Tensor | None, ...]


class Starts(NamedTuple):
    """Outputs that require a gradient, and what arrives at each."""

    outputs: list[Tensor]
    gradients: list[Tensor]


Receivers: TypeAlias = dict[int, Tensor]  # inputs that want a gradient, by their position


def find_starts(outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None]) -> Starts:
    """Pair outputs with their gradients. A loss without one gets 1; another output without one passes none on."""
    if len(outputs) != len(output_grads):
        raise InputError(
            f"there are {len(outputs)} outputs and {len(output_grads)} gradients for them: "
            "give one gradient for each output, None where there is none"
        )
    begun: list[Tensor] = []
    gradients: list[Tensor] = []
    for output, gradient in zip(outputs, output_grads, strict=True):
        if not output.requires_grad:
            continue
        if gradient is None:
            # A lone output without a gradient is a loss, even if its one element is not a scalar.
            if output.dim() and (len(outputs) > 1 or output.numel() != 1):
                continue
            gradient = _one_for(output)
        elif gradient.shape != output.shape:
            raise InputError(
                f"output {len(begun)} that requires a gradient has shape {list(output.shape)}, and its gradient has "
                f"{list(gradient.shape)}: the gradient must have the shape of the output"
            )
        elif is_distributed(gradient) != is_distributed(output):
            raise InputError(
                f"output {len(begun)} that requires a gradient is {text_of(output)}, and its gradient is "
                f"{text_of(gradient)}: that of a DTensor is a DTensor, and that of a plain tensor is plain"
            )
        begun.append(output)
        gradients.append(gradient)
    return Starts(begun, gradients)


def _one_for(loss: Tensor) -> Tensor:
    if loss.is_complex():
        raise InputError(f"a loss of dtype {loss.dtype} has no gradient by itself: give it one, or make the loss real")
    return torch.ones_like(loss)


def find_receivers(inputs: Sequence[Any]) -> Receivers:
    """The inputs that want a gradient. They have none so far."""
    receivers = {}
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.requires_grad:
            if value.grad_fn is not None:
                raise InputError(
                    f"input {index} is a result of {value.grad_fn.name()}, not a leaf: "
                    "run the stage on value.detach().requires_grad_(), and give that as the input"
                )
            value.grad = None
            receivers[index] = value
    return receivers


def take_gradients(inputs: Sequence[Any], receivers: Receivers) -> Gradients:
    """The gradients that autograd left at the inputs, which have none afterwards."""
    gradients: list[Tensor | None] = [None] * len(inputs)
    for index, leaf in receivers.items():
        gradients[index] = leaf.grad
    for leaf in receivers.values():
        leaf.grad = None
    return tuple(gradients)
