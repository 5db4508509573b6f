"""Operations whose weight gradients can be computed apart from the rest of their backward, and how."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .worth import work_of

Edges: TypeAlias = tuple[int, ...]


class Recipe(NamedTuple):
    """How to get some gradients that an operation sends on, from the one that arrives and saved tensors of these names.

    `work` estimates the cost, in operations on numbers; below 0 it never pays to put the gradients off.
    """

    work: float
    ingredients: tuple[str, ...]
    formula: Callable[..., tuple[Tensor | None, ...]]


class Operation(NamedTuple):
    """The edges of an operation along which weights may lie, those that go together as one, and recipes for them."""

    weight_edges: tuple[Edges, ...]
    recipe: Callable[[Any, Edges], Recipe]


@dataclass(frozen=True)
class _Product:
    """`left @ right` of two matrices. Operations and layouts are those of autograd: so are the results, to the bit."""

    left: str
    right: str
    right_edge: int = 1
    scale: str = ""

    def __call__(self, node: Any, edges: Edges) -> Recipe:
        scale = getattr(node, f"_saved_{self.scale}") if self.scale else 1
        rows, inner = getattr(node, f"_saved_{self.left}_sym_sizes")
        columns = getattr(node, f"_saved_{self.right}_sym_sizes")[1]
        if edges == (self.right_edge,):
            flipped = getattr(node, f"_saved_{self.right}_sym_strides") == (1, inner)
            formula = functools.partial(_right_factor, flipped, scale)
            return Recipe(work_of(inner * columns, rows), (self.left,), formula)
        flipped = getattr(node, f"_saved_{self.left}_sym_strides") == (1, rows)
        return Recipe(work_of(rows * inner, columns), (self.right,), functools.partial(_left_factor, flipped, scale))


def _right_factor(flipped: bool, scale: Any, gradient: Tensor, left: Tensor) -> tuple[Tensor]:
    product = gradient.t().mm(left.conj()).t() if flipped else left.t().conj().mm(gradient)
    return (_scaled(product, scale),)


def _left_factor(flipped: bool, scale: Any, gradient: Tensor, right: Tensor) -> tuple[Tensor]:
    product = right.conj().mm(gradient.t()).t() if flipped else gradient.mm(right.t().conj())
    return (_scaled(product, scale),)


def _scaled(product: Tensor, scale: Any) -> Tensor:
    return product if scale == 1 else product * scale.conjugate()


def _batched_product(node: Any, edges: Edges) -> Recipe:
    """`left @ right` of two batches of matrices, which is also what einsum makes of most products."""
    _, rows, columns = node._input_metadata[0].shape
    elements = _elements_behind(node, *edges)
    if edges == (1,):
        return Recipe(work_of(elements, rows), ("self",), _batched_right_factor)
    return Recipe(work_of(elements, columns), ("mat2",), _batched_left_factor)


def _elements_behind(node: Any, edge: int) -> int:
    """How many elements a gradient has that goes along this edge."""
    # A saved tensor would tell it too, but may be packed; unpacking it may start a recomputation.
    target, number = node.next_functions[edge]
    return math.prod(target._input_metadata[number].shape)


def _batched_right_factor(gradient: Tensor, left: Tensor) -> tuple[Tensor]:
    return (left.transpose(1, 2).conj().bmm(gradient),)


def _batched_left_factor(gradient: Tensor, right: Tensor) -> tuple[Tensor]:
    return (gradient.bmm(right.transpose(1, 2).conj()),)


def _convolution(node: Any, edges: Edges) -> Recipe:
    """Weight and bias together: the kernels that compute one often compute the other along with it."""
    shape = node._input_metadata[0].shape
    has_bias = node.next_functions[2][0] is not None
    work = work_of(_elements_behind(node, edges[0]), math.prod(shape) // max(1, shape[1]))
    names = "bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    options = [getattr(node, f"_saved_{name}") for name in names]
    formula = functools.partial(_convolution_weight, options, has_bias)
    return Recipe(-1 if has_bias and 2 not in edges else work, ("input", "weight"), formula)


def _convolution_weight(
    options: list[Any], has_bias: bool, gradient: Tensor, value: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    mask = [False, True, has_bias]
    _, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward(gradient, value, weight, *options, mask)
    return (weight_gradient, bias_gradient) if has_bias else (weight_gradient,)


def _embedding(node: Any, _: Edges) -> Recipe:
    rows, padding = node._saved_weight_sym_argsize_0, node._saved_padding_idx
    sparse, by_frequency = node._saved_sparse, node._saved_scale_grad_by_freq
    # No padding is -1, which the node shows as an unsigned number.
    options = rows, padding - 2**64 if padding >= 2**63 else padding, by_frequency, sparse
    work = -1 if sparse else work_of(_elements_behind(node, 0), 0)
    return Recipe(work, ("indices",), functools.partial(_embedding_weight, options))


def _embedding_weight(options: tuple[Any, ...], gradient: Tensor, indices: Tensor) -> tuple[Tensor]:
    return (torch.ops.aten.embedding_backward(gradient, indices, *options),)


OPERATIONS: Mapping[str, Operation] = {
    "MmBackward0": Operation(((1,), (0,)), _Product("self", "mat2")),
    "AddmmBackward0": Operation(((2,), (1,)), _Product("mat1", "mat2", right_edge=2, scale="alpha")),
    "BmmBackward0": Operation(((1,), (0,)), _batched_product),
    "ConvolutionBackward0": Operation(((1, 2), (1,)), _convolution),
    "EmbeddingBackward0": Operation(((0,),), _embedding),
}
