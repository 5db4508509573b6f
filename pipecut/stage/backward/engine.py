"""Where a backward starts and ends: outputs that pass a gradient on, inputs that receive one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...errors import InputError
from ..dtensor import is_distributed, text_of

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


# MERGED: The part of a microbatch's backward that is still to be done.


class Waiting(Protocol):
    """One of the things that wait for `weight_backward`; the gradient that it begins with may be exchanged."""

    gradient: Tensor | None


class PendingWeights:
    """What `input_backward` left for `weight_backward`; it can be used once."""

    __slots__ = ("_finish", "_waiting")

    def __init__(self, finish: Callable[[], None], waiting: Callable[[], Sequence[Waiting]] | None = None) -> None:
        self._finish: Callable[[], None] | None = finish
        self._waiting = waiting

    def waiting(self) -> Sequence[Waiting]:
        """What waits, as far as it can be told apart."""
        return () if self._waiting is None else self._waiting()

    @property
    def done(self) -> bool:
        """Whether it was used."""
        return self._finish is None

    def take(self) -> Callable[[], None]:
        """The work to do; all that it needs is released with it."""
        finish, self._finish = self._finish, None
        self._waiting = None
        if finish is None:
            raise InputError(
                "the weight gradients of this microbatch were added already: "
                "weight_backward() takes what an input_backward() returned once, and then lets go of it"
            )
        return finish


def nothing() -> None:
    """The rest of a backward that has none."""


# MERGED: Calls of autograd's engine, without what its Python front adds.


# Where a gradient is handed over: at a tensor, or at an edge of the graph.
Way: TypeAlias = Tensor | GradientEdge

_engine: Any = torch.autograd.Variable._execution_engine


def accumulate(ways: Sequence[Way], gradients: Sequence[Tensor]) -> None:
    """Pass gradients on to all leaves, and add them to `.grad`."""
    _run(ways, gradients, (), True)


def collect(ways: Sequence[Way], gradients: Sequence[Tensor], wanted: Sequence[Way]) -> list[Tensor | None]:
    """The gradients that get to what is wanted; no `.grad` changes."""
    return list(_run(ways, gradients, tuple(wanted), False))


def _run(ways: Sequence[Way], gradients: Sequence[Tensor], wanted: tuple[Way, ...], add: bool) -> Any:
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    options = False, False, wanted, True, add
    if gradients[0].is_cpu:
        # For a small stage, what torch.autograd.backward does besides takes longer than the backward itself: it checks
        # the shapes, which is done already, and prepares threads for devices, of which a CPU has none.
        return _engine.run_backward(tuple(ways), tuple(gradients), *options)
    return torch.autograd.graph._engine_run_backward(tuple(ways), tuple(gradients), *options)
