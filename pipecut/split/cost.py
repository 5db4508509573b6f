"""What a traced step costs: floating-point operations as an expression of the symbolic dims.

torch.utils.flop_counter counts while a model runs, on the operators below autograd; a trace holds the operators
above it (linear, scaled_dot_product_attention), with symbolic sizes, and nothing runs. What has no formula here, and is
made of other operators, counts as what it is made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from ..pipe_ir.effects import operator_name
from ..pipe_ir.spec import Dim, TensorSpec
from ..pipe_ir.traced import Ref, Step, TracedModel
from .costs.trial import Shape, try_step

Formula = Callable[[list[Any], Shape], Dim]


def _volume(shape: Shape) -> Dim:
    return math.prod(shape)


def _contraction(args: list[Any], out: Shape) -> Dim:
    """A matrix product: each output element sums over the last dim of the first argument."""
    return 2 * _volume(out) * args[0][-1]


def _second_contraction(args: list[Any], out: Shape) -> Dim:
    return 2 * _volume(out) * args[1][-1]


def _bilinear(args: list[Any], out: Shape) -> Dim:
    """Each output element sums over the last dims of both factors."""
    return 2 * _volume(out) * args[0][-1] * args[1][-1]


def _batch_sum(args: list[Any], out: Shape) -> Dim:
    """Products of matrices, summed over the batch."""
    return 2 * _volume(args[1]) * args[2][-1]


def _distances(args: list[Any], out: Shape) -> Dim:
    """Each distance sums over the last dim, a product for each element."""
    return 2 * _volume(out) * args[0][-1]


def _convolution(args: list[Any], out: Shape) -> Dim:
    return 2 * _volume(out) * _volume(args[1][1:])


def _any_convolution(args: list[Any], out: Shape) -> Dim:
    return (_transposed_convolution if args[6] else _convolution)(args, out)


def _time_convolution(args: list[Any], out: Shape) -> Dim:
    """The weight is (time, channels in, channels out)."""
    return 2 * _volume(out) * _volume(args[1][:2])


def _transposed_convolution(args: list[Any], out: Shape) -> Dim:
    return 2 * _volume(args[0]) * _volume(args[1][1:])


def _attention(args: list[Any], out: Shape) -> Dim:
    query, key, value = args[:3]
    return 2 * _volume(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(args: list[Any], out: Shape) -> Dim:
    """Every weight matrix of the layers is applied to every element of the sequence."""
    weights = next((arg for arg in args[1:] if isinstance(arg, list) and arg and len(arg[0]) == 2), [])
    return 2 * _volume(args[0][:-1]) * sum(_volume(weight) for weight in weights if len(weight) == 2)


def _eager_call(args: list[Any], out: Shape) -> Dim:
    """Nobody looked inside: every weight matrix is taken to be applied to every row of the first argument."""
    rows = _volume(args[0][0][:-1]) if args[0] else 1
    return 2 * rows * sum(_volume(weight) for weight in args[1] if len(weight) > 1)


def _of(formula: Formula, names: str) -> dict[str, Formula]:
    return {f"aten::{name}": formula for name in names.split()}


FORMULAS: Mapping[str, Formula] = {
    **_of(_contraction, "linear matmul mm bmm mv dot vdot _grouped_mm _scaled_mm"),
    **_of(_second_contraction, "addmm baddbmm addmv"),
    **_of(_batch_sum, "addbmm"),
    **_of(_bilinear, "bilinear"),
    **_of(_distances, "cdist"),
    **_of(_convolution, "conv1d conv2d conv3d"),
    **_of(_any_convolution, "convolution _convolution"),
    **_of(_time_convolution, "conv_tbc"),
    **_of(_transposed_convolution, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_of(_attention, "scaled_dot_product_attention"),
    "flex_attention": _attention,
    "pipecut::eager_call": _eager_call,
    **_of(_recurrent, "lstm gru rnn_tanh rnn_relu"),
}


def step_flops(traced: TracedModel, step: Step) -> Dim:
    """The floating-point operations of a step's matrix products and convolutions; 0 for all other operations."""
    if step.kind != "op":
        return 0
    formula = FORMULAS.get(operator_name(step.target))
    if formula is None:
        return _flops_of_parts(traced, step)

    def shapes(value: Any) -> Any:
        if isinstance(value, Ref):
            spec = traced.steps[value.index].spec
            return spec.shape if spec is not None else ()
        return [shapes(item) for item in value] if isinstance(value, list | tuple) else value

    out = step.spec.shape if step.spec is not None else ()
    return formula([shapes(arg) for arg in step.args], out)


def _flops_of_parts(traced: TracedModel, step: Step) -> Dim:
    tried = try_step(traced, step) if _may_hold_products(step.target) else None
    parts = () if tried is None else tried.parts
    return sum((FORMULAS[part.name](list(part.args), part.out) for part in parts if part.name in FORMULAS), 0)


@functools.cache
def _may_hold_products(target: Any) -> bool:
    """Whether an operator is made of others, and gives back more than a view of what it takes."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        and not any(result.alias_info for result in target._schema.returns)
    )


def flops_between(traced: TracedModel, begin: int, end: int) -> sympy.Expr:
    """The floating-point operations of the forward between two ticks."""
    return sympy.Add(*(step_flops(traced, step) for step in traced.steps_within(begin, end)))


class Weights:
    """What steps and tensors weigh at given sizes; sizes that depend on data count as one."""

    def __init__(self, traced: TracedModel, sizes: Mapping[str, int]) -> None:
        self._traced = traced
        self._sizes = sizes
        self._numbers: dict[sympy.Basic, int] = {}

    def number(self, dim: Dim) -> int:
        """A dim at the given sizes."""
        if isinstance(dim, int):
            return dim
        if dim not in self._numbers:
            known = {symbol: self._sizes.get(str(symbol), 1) for symbol in dim.free_symbols}
            self._numbers[dim] = int(dim.subs(known))
        return self._numbers[dim]

    def elements(self, spec: TensorSpec | None) -> int:
        """The elements of a tensor."""
        return 0 if spec is None else math.prod(map(self.number, spec.shape))

    def step(self, step: Step) -> int:
        """How much a step counts when stages are balanced: its FLOPs, and the elements that it writes."""
        if step.kind != "op":
            return 0
        return max(1, self.number(step_flops(self._traced, step)) + self.elements(step.spec))
