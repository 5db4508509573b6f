"""Autograd nodes whose weight gradients can be computed later than the rest of their backward, and the formulas.

`DEFERRABLE_NODES` has an entry for each kind of node; `Deferred` holds the weight gradients of one node until then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ...errors import InputError
from ...text import shape_text
from ...torch_internals import (
    NodeKind,
    gradient_shape,
    is_only_hook,
    is_packed,
    is_python_node,
    saved_value,
    version_of,
)
from .autograd import Root
from .weights import register_own_hook, weight_gradient_work

_Edges: TypeAlias = tuple[int, ...]


class _Recipe(NamedTuple):
    """A formula for some gradients that a node passes on, from the one that arrives and saved tensors of these names.

    `work` estimates the cost, in operations on numbers; below 0 it is never worth deferring the gradients.
    """

    work: float
    ingredients: tuple[str, ...]
    formula: Callable[..., tuple[Tensor | None, ...]]


class DeferrableNode(NamedTuple):
    """The edges of a node along which weights may lie, as groups that go together, and their recipes."""

    weight_edges: tuple[_Edges, ...]
    recipe: Callable[[Any, _Edges], _Recipe]


@dataclass(frozen=True)
class _Product:
    """Recipe of `left @ right` of two matrices. Operations and layouts are those of autograd: so are the bits."""

    left: str
    right: str
    right_edge: int = 1
    scale: str = ""

    def __call__(self, node: Any, edges: _Edges) -> _Recipe:
        scale = saved_value(node, self.scale) if self.scale else 1
        rows, inner = saved_value(node, f"{self.left}_sym_sizes")
        columns = saved_value(node, f"{self.right}_sym_sizes")[1]
        if edges == (self.right_edge,):
            flipped = saved_value(node, f"{self.right}_sym_strides") == (1, inner)
            formula = functools.partial(_right_factor, flipped, scale)
            return _Recipe(weight_gradient_work(inner * columns, rows), (self.left,), formula)
        flipped = saved_value(node, f"{self.left}_sym_strides") == (1, rows)
        return _Recipe(
            weight_gradient_work(rows * inner, columns), (self.right,), functools.partial(_left_factor, flipped, scale)
        )


def _right_factor(flipped: bool, scale: Any, gradient: Tensor, left: Tensor) -> tuple[Tensor]:
    product = gradient.t().mm(left.conj()).t() if flipped else left.t().conj().mm(gradient)
    return (_scaled(product, scale),)


def _left_factor(flipped: bool, scale: Any, gradient: Tensor, right: Tensor) -> tuple[Tensor]:
    product = right.conj().mm(gradient.t()).t() if flipped else gradient.mm(right.t().conj())
    return (_scaled(product, scale),)


def _scaled(product: Tensor, scale: Any) -> Tensor:
    return product if scale == 1 else product * scale.conjugate()


def _batched_product(node: Any, edges: _Edges) -> _Recipe:
    """Return the recipe of `left @ right` of two batches of matrices, which einsum makes of most products too."""
    _, rows, columns = gradient_shape(node)
    elements = _elements_behind(node, *edges)
    if edges == (1,):
        return _Recipe(weight_gradient_work(elements, rows), ("self",), _batched_right_factor)
    return _Recipe(weight_gradient_work(elements, columns), ("mat2",), _batched_left_factor)


def _elements_behind(node: Any, edge: int) -> int:
    """Return the number of elements of the gradient that goes along this edge."""
    # A saved tensor would show it too, but may be packed; unpacking it may start a recomputation.
    target, number = node.next_functions[edge]
    return math.prod(gradient_shape(target, number))


def _batched_right_factor(gradient: Tensor, left: Tensor) -> tuple[Tensor]:
    return (left.transpose(1, 2).conj().bmm(gradient),)


def _batched_left_factor(gradient: Tensor, right: Tensor) -> tuple[Tensor]:
    return (gradient.bmm(right.transpose(1, 2).conj()),)


def _convolution(node: Any, edges: _Edges) -> _Recipe:
    """Return the recipe of weight and bias together: kernels that compute one often compute the other with it."""
    shape = gradient_shape(node)
    has_bias = node.next_functions[2][0] is not None
    work = weight_gradient_work(_elements_behind(node, edges[0]), math.prod(shape) // max(1, shape[1]))
    names = "bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    options = [saved_value(node, name) for name in names]
    formula = functools.partial(_convolution_weight, options, has_bias)
    return _Recipe(-1 if has_bias and 2 not in edges else work, ("input", "weight"), formula)


def _convolution_weight(
    options: list[Any], has_bias: bool, gradient: Tensor, value: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    mask = [False, True, has_bias]
    _, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward(gradient, value, weight, *options, mask)
    return (weight_gradient, bias_gradient) if has_bias else (weight_gradient,)


def _embedding(node: Any, _: _Edges) -> _Recipe:
    rows, padding = saved_value(node, "weight_sym_argsize_0"), saved_value(node, "padding_idx")
    sparse, by_frequency = saved_value(node, "sparse"), saved_value(node, "scale_grad_by_freq")
    # No padding is -1, which the node shows as an unsigned number.
    options = rows, padding - 2**64 if padding >= 2**63 else padding, by_frequency, sparse
    work = -1 if sparse else weight_gradient_work(_elements_behind(node, 0), 0)
    return _Recipe(work, ("indices",), functools.partial(_embedding_weight, options))


def _embedding_weight(options: tuple[Any, ...], gradient: Tensor, indices: Tensor) -> tuple[Tensor]:
    return (torch.ops.aten.embedding_backward(gradient, indices, *options),)


DEFERRABLE_NODES: Mapping[str, DeferrableNode] = {
    NodeKind.MM: DeferrableNode(((1,), (0,)), _Product("self", "mat2")),
    NodeKind.ADDMM: DeferrableNode(((2,), (1,)), _Product("mat1", "mat2", right_edge=2, scale="alpha")),
    NodeKind.BMM: DeferrableNode(((1,), (0,)), _batched_product),
    NodeKind.CONVOLUTION: DeferrableNode(((1, 2), (1,)), _convolution),
    NodeKind.EMBEDDING: DeferrableNode(((0,),), _embedding),
}


class Deferred:
    """Deferred gradients: a recipe, the tensors that the node saved for it, and the gradient that arrives at the node.

    The tensors are taken out of the graph at once, for it drops them during the backward. A hook on the node records
    the gradient, with the changes that other hooks made to it.
    """

    __slots__ = ("_formula", "_gradient", "_handle", "_kind", "_targets", "_tensors", "_versions")

    def __init__(self, node: Node, recipe: _Recipe, tensors: Sequence[Tensor], targets: Sequence[tuple[Node, int]]):
        self._kind = type(node).__name__
        self._formula = recipe.formula
        # Without detach() each would keep the graph behind it alive.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [version_of(tensor) for tensor in tensors]
        # A node written in Python is not kept alive by a reference to it, but by those that lead to it.
        self._targets = [
            GradientEdge(target, number, node if is_python_node(target) else None) for target, number in targets
        ]
        self._gradient: Tensor | None = None
        self._handle = register_own_hook(node.register_hook, self._record)

    @classmethod
    def of(cls, node: Node, recipe: _Recipe, targets: Sequence[tuple[Node, int]]) -> Deferred | None:
        """Defer a recipe; return None if that is not possible.

        Obstacles are saved tensors that are sparse, or packed by hooks, as checkpoints and offloading do it, and hooks
        of others on the node, which would miss the weight's gradient.
        """
        tensors = []
        for name in recipe.ingredients:
            if is_packed(node, name):
                return None
            tensors.append(saved_value(node, name))
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        made = cls(node, recipe, tensors, targets)
        if is_only_hook(made._handle) and not (_runs_no_more(node, targets) and _has_hooks_before(node)):
            return made
        made.unhook()
        return None

    def _record(self, _: object, gradients: Sequence[Tensor | None]) -> None:
        self._gradient = gradients[0]

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that arrived at the node."""
        return self._gradient

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        self._gradient = gradient

    def unhook(self) -> None:
        """Remove the hook from the node."""
        self._handle.remove()

    def set_if_missing(self, gradient: Tensor | None) -> None:
        """Set the gradient that autograd gives for a node that did not run, whose hook was not called."""
        if self._gradient is None:
            self._gradient = gradient

    def compute(self) -> list[tuple[Root, Tensor]]:
        """Return the gradients and where they enter the graph again, none if none arrived; release what it took."""
        gradient, self._gradient = self._gradient, None
        tensors, self._tensors = self._tensors, []
        if gradient is None:
            return []
        for tensor, version in zip(tensors, self._versions, strict=True):
            if version_of(tensor) != version:
                raise InputError(
                    f"a tensor of shape {shape_text(tensor.shape)} that {self._kind} saved for a weight gradient was "
                    f"changed in place between input_backward and weight_backward (version {version_of(tensor)}, "
                    f"expected {version}): change it after weight_backward, or change a copy"
                )
        pairs = zip(self._targets, self._formula(gradient, *tensors), strict=True)
        return [(_entry_at(edge, made), made) for edge, made in pairs if made is not None]


def _runs_no_more(node: Node, targets: Sequence[tuple[Node, int]]) -> bool:
    """Return True if nothing is left for the node to compute when these gradients are deferred."""
    return len(targets) == sum(target is not None for target, _ in node.next_functions)


def _has_hooks_before(node: Node) -> bool:
    handle = register_own_hook(node.register_prehook, lambda gradients: None)
    only = is_only_hook(handle)
    handle.remove()
    return not only


def _entry_at(edge: GradientEdge, gradient: Tensor) -> Root:
    """Return where a gradient enters: given directly to an accumulator it would be copied, for we refer to it still."""
    parameter: Any = getattr(edge.node, "variable", None)
    plain = type(parameter) in (Tensor, torch.nn.Parameter) and gradient.layout is torch.strided
    if not plain or parameter.grad is not None:
        return edge
    with torch.enable_grad():
        view: Tensor = parameter.view_as(parameter)
    return view
