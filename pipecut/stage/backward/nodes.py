"""Autograd nodes whose weight gradients can be computed later than the rest of their backward, and the formulas.

`DEFERRABLE_NODES` has an entry for each kind of node; `Deferred` holds the weight gradients of one node until then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

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
_Formula: TypeAlias = Callable[..., tuple[Tensor | None, ...]]  # of the gradient that arrives and the saved tensors


class Recipe(NamedTuple):
    """Gradients that a node passes on, from the one that arrives and saved tensors of these names.

    `work` estimates the cost, in operations on numbers; below 0 it is never worth deferring the gradients. `formula`
    is made for each node, as it depends on the options of its operation.
    """

    ingredients: tuple[str, ...]
    work: Callable[[Any], float]
    formula: Callable[[Any], _Formula]


DeferrableNode: TypeAlias = Mapping[_Edges, Recipe]  # by edges along which weights may lie, as groups that go together

# Rows up to which the addition of a weight gradient to the sum is a notable part of the work of making it. A product
# that is added to the sum while it is computed is rounded in another way than one that is added afterwards.
_MOST_ROWS_TO_ADD = 128


def _is_worth_adding(rows: int) -> bool:
    return rows <= _MOST_ROWS_TO_ADD


class _Factor:
    """Gradient of a factor of a product, by an operation and with a layout of autograd's: so it has the same bits."""

    __slots__ = ("flipped", "scale")

    def __init__(self, flipped: bool, scale: Any) -> None:
        self.flipped = flipped
        self.scale = scale


class _RightFactor(_Factor):
    """Gradient of the right factor."""

    __slots__ = ()

    def __call__(self, gradient: Tensor, left: Tensor) -> tuple[Tensor]:
        product = gradient.t().mm(left.conj()).t() if self.flipped else left.t().conj().mm(gradient)
        return (_scaled(product, self.scale),)

    def add_to(self, total: Tensor, is_transposed: bool, gradient: Tensor, left: Tensor) -> bool:
        """Add it, or its transpose, to a sum while it is computed; return False if that is not worth it."""
        if is_transposed is not self.flipped or self.scale != 1 or not _is_worth_adding(len(left)):
            return False
        if is_transposed:
            total.addmm_(gradient.t(), left.conj())
        else:
            total.addmm_(left.t().conj(), gradient)
        return True


class _LeftFactor(_Factor):
    """Gradient of the left factor."""

    __slots__ = ()

    def __call__(self, gradient: Tensor, right: Tensor) -> tuple[Tensor]:
        product = right.conj().mm(gradient.t()).t() if self.flipped else gradient.mm(right.t().conj())
        return (_scaled(product, self.scale),)


def _scaled(product: Tensor, scale: Any) -> Tensor:
    return product if scale == 1 else product * scale.conjugate()


def _product(left: str, right: str, edges: tuple[int, int], scale: str = "") -> DeferrableNode:
    """Return the recipes of `left @ right` of two matrices, which have these edges; the right one is tried first."""
    left_sizes, left_strides = f"{left}_sym_sizes", f"{left}_sym_strides"
    right_sizes, right_strides = f"{right}_sym_sizes", f"{right}_sym_strides"

    def factor(node: Any) -> Any:
        return saved_value(node, scale) if scale else 1

    def right_formula(node: Any) -> _RightFactor:
        return _RightFactor(saved_value(node, right_strides) == (1, saved_value(node, right_sizes)[0]), factor(node))

    def left_formula(node: Any) -> _LeftFactor:
        return _LeftFactor(saved_value(node, left_strides) == (1, saved_value(node, left_sizes)[0]), factor(node))

    def work(node: Any, of_right: bool) -> float:
        (rows, inner), (_, columns) = saved_value(node, left_sizes), saved_value(node, right_sizes)
        return weight_gradient_work(*((inner * columns, rows) if of_right else (rows * inner, columns)))

    return {
        (edges[1],): Recipe((left,), functools.partial(work, of_right=True), right_formula),
        (edges[0],): Recipe((right,), functools.partial(work, of_right=False), left_formula),
    }


def _batched_product() -> DeferrableNode:
    """Return the recipes of `left @ right` of two batches of matrices, which einsum makes of most products too."""

    def work(node: Any, edge: int) -> float:
        _, rows, columns = gradient_shape(node)
        return weight_gradient_work(_elements_behind(node, edge), rows if edge else columns)

    return {
        (1,): Recipe(("self",), functools.partial(work, edge=1), lambda _: _batched_right_factor),
        (0,): Recipe(("mat2",), functools.partial(work, edge=0), lambda _: _batched_left_factor),
    }


def _elements_behind(node: Any, edge: int) -> int:
    """Return the number of elements of the gradient that goes along this edge."""
    # A saved tensor would show it too, but may be packed; unpacking it may start a recomputation.
    target, number = node.next_functions[edge]
    return math.prod(gradient_shape(target, number))


def _batched_right_factor(gradient: Tensor, left: Tensor) -> tuple[Tensor]:
    return (left.transpose(1, 2).conj().bmm(gradient),)


def _batched_left_factor(gradient: Tensor, right: Tensor) -> tuple[Tensor]:
    return (gradient.bmm(right.transpose(1, 2).conj()),)


_CONVOLUTION = "bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups"


def _convolution(with_bias: bool) -> Recipe:
    """Return the recipe of weight and bias together: kernels that compute one often compute the other with it."""

    def work(node: Any) -> float:
        if not with_bias and node.next_functions[2][0] is not None:
            return -1
        shape = gradient_shape(node)
        return weight_gradient_work(_elements_behind(node, 1), math.prod(shape) // max(1, shape[1]))

    def formula(node: Any) -> _Formula:
        return functools.partial(_convolution_weight, [saved_value(node, name) for name in _CONVOLUTION], with_bias)

    return Recipe(("input", "weight"), work, formula)


def _convolution_weight(
    options: list[Any], has_bias: bool, gradient: Tensor, value: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    mask = [False, True, has_bias]
    _, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward(gradient, value, weight, *options, mask)
    return (weight_gradient, bias_gradient) if has_bias else (weight_gradient,)


def _embedding_work(node: Any) -> float:
    return -1 if saved_value(node, "sparse") else weight_gradient_work(_elements_behind(node, 0), 0)


def _embedding_formula(node: Any) -> _Formula:
    rows, padding = saved_value(node, "weight_sym_argsize_0"), saved_value(node, "padding_idx")
    sparse, by_frequency = saved_value(node, "sparse"), saved_value(node, "scale_grad_by_freq")
    # No padding is -1, which the node shows as an unsigned number.
    options = rows, padding - 2**64 if padding >= 2**63 else padding, by_frequency, sparse
    return functools.partial(_embedding_weight, options)


def _embedding_weight(options: tuple[Any, ...], gradient: Tensor, indices: Tensor) -> tuple[Tensor]:
    return (torch.ops.aten.embedding_backward(gradient, indices, *options),)


DEFERRABLE_NODES: Mapping[str, DeferrableNode] = {
    NodeKind.MM: _product("self", "mat2", (0, 1)),
    NodeKind.ADDMM: _product("mat1", "mat2", (1, 2), scale="alpha"),
    NodeKind.BMM: _batched_product(),
    NodeKind.CONVOLUTION: {(1, 2): _convolution(with_bias=True), (1,): _convolution(with_bias=False)},
    NodeKind.EMBEDDING: {(0,): Recipe(("indices",), _embedding_work, _embedding_formula)},
}


class Deferred:
    """Deferred gradients: a recipe, the tensors that the node saved for it, and the gradient that arrives at the node.

    The tensors are taken out of the graph at once, for it drops them during the backward. On a node that may have hooks
    of others, a hook records the gradient, with the changes that those made to it.
    """

    __slots__ = ("_formula", "_gradient", "_handle", "_kind", "_sinks", "_targets", "_tensors", "_versions")

    def __init__(
        self,
        node: Node,
        recipe: Recipe,
        tensors: Sequence[Tensor],
        targets: Sequence[tuple[Node, int]],
        sinks: Sequence[Sink | None],
    ) -> None:
        self._kind = type(node)
        self._formula = recipe.formula(node)
        # Without detach() each would keep the graph behind it alive.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [version_of(tensor) for tensor in tensors]
        # A node written in Python is not kept alive by a reference to it, but by those that lead to it.
        self._targets = [
            GradientEdge(target, number, node if sink is None and is_python_node(target) else None)
            for (target, number), sink in zip(targets, sinks, strict=True)
        ]
        self._sinks = sinks
        self._gradient: Tensor | None = None
        self._handle: RemovableHandle | None = None

    @classmethod
    def of(
        cls,
        node: Node,
        recipe: Recipe,
        targets: Sequence[tuple[Node, int]],
        sinks: Sequence[Sink | None],
        unhooked: bool,
    ) -> Deferred | None:
        """Defer a recipe, whose gradients go to nodes, some of which are sinks; return None if that is not possible.

        Obstacles are saved tensors that are sparse, or packed by hooks, as checkpoints and offloading do it, and hooks
        of others on the node, which would miss the weight's gradient; an `unhooked` node is known to have none.
        """
        tensors = []
        for name in recipe.ingredients:
            if is_packed(node, name):
                return None
            tensors.append(saved_value(node, name))
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        made = cls(node, recipe, tensors, targets, sinks)
        if unhooked:
            return made
        made._handle = register_own_hook(node.register_hook, made._record)
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
        if self._handle is not None:
            self._handle.remove()

    def set_if_missing(self, gradient: Tensor | None) -> None:
        """Set the gradient that autograd gives for a node whose hook was not called: it has none, or did not run."""
        if self._gradient is None:
            self._gradient = gradient

    def compute(self, directly: bool) -> list[tuple[Root, Tensor]]:
        """Return the gradients and where they enter the graph again, none if none arrived; release what it took.

        With `directly`, those of known parameters are added to `.grad` here where autograd would do no more than that.
        """
        gradient, self._gradient = self._gradient, None
        tensors, self._tensors = self._tensors, []
        if gradient is None:
            return []
        for tensor, version in zip(tensors, self._versions, strict=True):
            if version_of(tensor) != version:
                raise InputError(
                    f"a tensor of shape {shape_text(tensor.shape)} that {self._kind.__name__} saved for a weight "
                    f"gradient was changed in place between input_backward and weight_backward (version "
                    f"{version_of(tensor)}, expected {version}): change it after weight_backward, or change a copy"
                )
        if directly and self._added(gradient, tensors):
            return []
        rest = []
        for edge, sink, made in zip(self._targets, self._sinks, self._formula(gradient, *tensors), strict=True):
            if made is not None and not (directly and sink is not None and sink.add(made)):
                rest.append((_entry_at(edge, made), made))
        return rest

    def _added(self, gradient: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Add the one gradient there is to the sum of its parameter, without a place of its own, and return True."""
        sink, formula = self._sinks[0], self._formula
        if sink is None or sink.parameter.grad is None or not isinstance(formula, _RightFactor):
            return False
        total = sink.parameter.grad
        return _is_plain_sum(total, gradient) and formula.add_to(total, sink.is_transposed, gradient, tensors[0])


class Sink(NamedTuple):
    """A parameter whose gradient nobody listens to; between it and a node lies a transposition, or nothing."""

    parameter: Tensor
    is_transposed: bool = False

    def add(self, gradient: Tensor) -> bool:
        """Add a gradient that nobody else refers to; return False if autograd would do more than that."""
        parameter, gradient = self.parameter, gradient.t() if self.is_transposed else gradient
        if parameter.grad is not None:
            return add_in_place(parameter.grad, gradient)
        alike = gradient.layout is torch.strided and gradient.dtype == parameter.dtype
        if not alike or gradient.stride() != parameter.stride():
            return False
        parameter.grad = gradient
        return True


def _is_plain_sum(total: Tensor, gradient: Tensor) -> bool:
    """Return True if autograd would add a gradient in place to this `.grad`, and do no more than that."""
    plain = type(total) is Tensor and total.layout is torch.strided is gradient.layout
    return plain and total.dtype == gradient.dtype and not total.requires_grad


def add_in_place(total: Tensor, gradient: Tensor) -> bool:
    """Add a gradient to a plain `.grad`; return False for another one, which autograd may replace."""
    if not _is_plain_sum(total, gradient):
        return False
    total.add_(gradient)
    return True


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
