"""Full backward of one stage, and the steps of which it consists: roots, input leaves, autograd's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...errors import InputError
from ...text import shape_text
from ...torch_internals import run_backward
from ..dtensor import describe_tensor, is_distributed

Gradients: TypeAlias = tuple[Tensor | None, ...]
InputLeaves: TypeAlias = dict[int, Tensor]  # inputs that require a gradient, by their position
Root: TypeAlias = Tensor | GradientEdge  # a place of the graph at which a gradient enters


def full_backward(outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None], inputs: Sequence[Any]) -> Gradients:
    """Return the gradients of the inputs, and add those of the parameters to their `.grad`.

    A loss has the gradient None, which stands for 1. Another output with None does not take part. Inputs are the leaves
    that the stage ran on. One that is not a tensor, needs no gradient or has no influence gets None.

    >>> layer, value = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2, requires_grad=True)
    >>> gradients = full_backward([layer(value)], [torch.ones(1, 1)], [value, 7])
    >>> torch.equal(gradients[0], layer.weight), gradients[1], layer.weight.grad
    (True, None, tensor([[1., 1.]]))
    """
    roots, leaves = find_roots(outputs, output_grads), find_input_leaves(inputs)
    if roots.outputs:
        run_backward(roots.outputs, roots.gradients, (), accumulate=True)
    return pop_gradients(inputs, leaves)


class Roots(NamedTuple):
    """Outputs that require a gradient, and the gradient of each."""

    outputs: list[Tensor]
    gradients: list[Tensor]


def find_roots(outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None]) -> Roots:
    """Pair outputs with their gradients. A loss without one gets 1; another output without one is left out."""
    if len(outputs) != len(output_grads):
        raise InputError(
            f"there are {len(outputs)} outputs and {len(output_grads)} gradients for them: "
            "give one gradient for each output, None where there is none"
        )
    roots: list[Tensor] = []
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
                f"output {len(roots)} that requires a gradient has shape {shape_text(output.shape)}, and its "
                f"gradient has {shape_text(gradient.shape)}: the gradient must have the shape of the output"
            )
        elif type(gradient) is not type(output) and is_distributed(gradient) != is_distributed(output):
            raise InputError(
                f"output {len(roots)} that requires a gradient is {describe_tensor(output)}, and its gradient is "
                f"{describe_tensor(gradient)}: that of a DTensor is a DTensor, and that of a plain tensor is plain"
            )
        roots.append(output)
        gradients.append(gradient)
    return Roots(roots, gradients)


def _one_for(loss: Tensor) -> Tensor:
    if loss.is_complex():
        raise InputError(f"a loss of dtype {loss.dtype} has no gradient by itself: give it one, or make the loss real")
    return torch.ones_like(loss)


def find_input_leaves(inputs: Sequence[Any]) -> InputLeaves:
    """Return the inputs that require a gradient, and clear their `.grad`."""
    leaves = {}
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.requires_grad:
            if value.grad_fn is not None:
                raise InputError(
                    f"input {index} is a result of {value.grad_fn.name()}, not a leaf: "
                    "run the stage on value.detach().requires_grad_(), and give that as the input"
                )
            value.grad = None
            leaves[index] = value
    return leaves


def pop_gradients(inputs: Sequence[Any], leaves: InputLeaves) -> Gradients:
    """Return the gradients that autograd left at the inputs, and clear them there."""
    gradients: list[Tensor | None] = [None] * len(inputs)
    for index, leaf in leaves.items():
        gradients[index] = leaf.grad
    for leaf in leaves.values():
        leaf.grad = None
    return tuple(gradients)


def accumulate(roots: Sequence[Root], gradients: Sequence[Tensor]) -> None:
    """Run the backward to all leaves, and add to their `.grad`."""
    run_backward(roots, gradients, (), accumulate=True)


def collect(roots: Sequence[Root], gradients: Sequence[Tensor], wanted: Sequence[Root]) -> list[Tensor | None]:
    """Return the gradients that reach the wanted places; no `.grad` changes."""
    return list(run_backward(roots, gradients, wanted, accumulate=False))


class PendingGradient(Protocol):
    """A gradient at which a part of `weight_backward` begins; it may be replaced before."""

    gradient: Tensor | None


class PendingWeights:
    """The work that `input_backward` left for `weight_backward`; it can be done once."""

    __slots__ = ("_finish", "_gradients")

    def __init__(
        self, finish: Callable[[], None], gradients: Callable[[], Sequence[PendingGradient]] | None = None
    ) -> None:
        self._finish: Callable[[], None] | None = finish
        self._gradients = gradients

    def pending_gradients(self) -> Sequence[PendingGradient]:
        """Return the gradients that the work begins with, as far as they are known one by one."""
        return () if self._gradients is None else self._gradients()

    @property
    def is_empty(self) -> bool:
        """True if the input part has done all there is to do."""
        return self._finish is no_work

    @property
    def done(self) -> bool:
        """True after `take()`."""
        return self._finish is None

    def take(self) -> Callable[[], None]:
        """Return the work to do, and drop all references to what it needs."""
        finish, self._finish = self._finish, None
        self._gradients = None
        if finish is None:
            raise InputError(
                "the weight gradients of this microbatch were added already: "
                "weight_backward() takes what an input_backward() returned once, and then lets go of it"
            )
        return finish


def no_work() -> None:
    """Do nothing: the weight part of a backward that has none."""
