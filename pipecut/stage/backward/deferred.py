"""Weight gradients of one operation that are computed later than the rest of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ...errors import InputError
from .engine import Way
from .hook_count import is_alone, put_hook
from .weight_gradients import Recipe


class Deferred:
    """A recipe and what it takes: tensors that the operation saved, and the gradient that arrives at it.

    The tensors are taken out of the graph at once, which lets go of them during the backward. The gradient is noted by
    a hook on the operation, and so is what other hooks made of it.
    """

    __slots__ = ("_formula", "_gradient", "_handle", "_kind", "_targets", "_tensors", "_versions")

    def __init__(self, node: Node, recipe: Recipe, tensors: Sequence[Tensor], targets: Sequence[tuple[Node, int]]):
        self._kind = type(node).__name__
        self._formula = recipe.formula
        # Without detach() each would keep the graph behind it alive.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]
        # An operation written in Python is not kept alive by a reference to it, but by those that lead to it.
        self._targets = [
            GradientEdge(target, number, node if issubclass(type(target), torch._C._FunctionBase) else None)
            for target, number in targets
        ]
        self._gradient: Tensor | None = None
        self._handle = put_hook(node.register_hook, self._note)

    @classmethod
    def of(cls, node: Node, recipe: Recipe, targets: Sequence[tuple[Node, int]]) -> Deferred | None:
        """Put a recipe off; None where something is in the way.

        That is: saved tensors that are sparse or packed by hooks, as checkpoints and offloading do it, and hooks of
        others on the operation, who would miss the weight's gradient.
        """
        tensors = []
        for name in recipe.ingredients:
            if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", None) is not None:
                return None
            tensors.append(getattr(node, f"_saved_{name}"))
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        made = cls(node, recipe, tensors, targets)
        if is_alone(made._handle) and not (_runs_no_more(node, targets) and _has_hooks_before(node)):
            return made
        made.unhook()
        return None

    def _note(self, _: object, gradients: Sequence[Tensor | None]) -> None:
        self._gradient = gradients[0]

    @property
    def gradient(self) -> Tensor | None:
        """What arrived at the operation."""
        return self._gradient

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        self._gradient = gradient

    def unhook(self) -> None:
        """Listen to the operation no longer."""
        self._handle.remove()

    def arrived(self, gradient: Tensor | None) -> None:
        """The gradient that autograd gives for the operation; right if it did not run, for then no hook was called."""
        if self._gradient is None:
            self._gradient = gradient

    def compute(self) -> list[tuple[Way, Tensor]]:
        """The gradients and the ways on which they go on, none if none arrived. All that it took is released."""
        gradient, self._gradient = self._gradient, None
        tensors, self._tensors = self._tensors, []
        if gradient is None:
            return []
        for tensor, version in zip(tensors, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"a tensor of shape {list(tensor.shape)} that {self._kind} saved for a weight gradient was changed "
                    f"in place between input_backward and weight_backward (version {tensor._version}, expected "
                    f"{version}): change it after weight_backward, or change a copy"
                )
        made = self._formula(gradient, *tensors)
        return [(_way_in(edge, made), made) for edge, made in zip(self._targets, made, strict=True) if made is not None]


def _runs_no_more(node: Node, targets: Sequence[tuple[Node, int]]) -> bool:
    """Whether nothing is left for the operation to compute, if these gradients are put off."""
    return len(targets) == sum(target is not None for target, _ in node.next_functions)


def _has_hooks_before(node: Node) -> bool:
    handle = put_hook(node.register_prehook, lambda gradients: None)
    alone = is_alone(handle)
    handle.remove()
    return not alone


def _way_in(edge: GradientEdge, gradient: Tensor) -> Way:
    """Where to hand over a gradient. Given directly to an accumulator it would be copied, for we refer to it still."""
    parameter: Any = getattr(edge.node, "variable", None)
    plain = type(parameter) in (Tensor, torch.nn.Parameter) and gradient.layout is torch.strided
    if not plain or parameter.grad is not None:
        return edge
    with torch.enable_grad():
        view: Tensor = parameter.view_as(parameter)
    return view
