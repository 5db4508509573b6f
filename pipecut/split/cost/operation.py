"""What a traced operation costs: floating-point operations as an expression of the symbolic dims.

torch.utils.flop_counter counts while a model runs, on the operators below autograd; a trace holds the operators
above it (linear, scaled_dot_product_attention), with symbolic sizes, and nothing runs. What has no formula here, and is
made of other operators, counts as what it is made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ...pipe_ir import Dim, Operation, Ref, TensorSpec, TracedModel, operator_name
from .saved import MemoryMap, SavedValues, bytes_of
from .trial import Shape, try_operation

_Formula = Callable[[list[Any], Shape], Dim]


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


def _of(formula: _Formula, names: str) -> dict[str, _Formula]:
    return {f"aten::{name}": formula for name in names.split()}


_FORMULAS: Mapping[str, _Formula] = {
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


def operation_flops(traced: TracedModel, op: Operation) -> Dim:
    """The floating-point operations of an operation's matrix products and convolutions; 0 for all other operations."""
    if op.kind != "op":
        return 0
    formula = _FORMULAS.get(operator_name(op.target))
    if formula is None:
        return _flops_of_parts(traced, op)

    def shapes(value: Any) -> Any:
        if isinstance(value, Ref):
            spec = traced.operations[value.index].spec
            return spec.shape if spec is not None else ()
        return [shapes(item) for item in value] if isinstance(value, list | tuple) else value

    out = op.spec.shape if op.spec is not None else ()
    return formula([shapes(arg) for arg in op.args], out)


def _flops_of_parts(traced: TracedModel, op: Operation) -> Dim:
    tried = try_operation(traced, op) if _may_hold_products(op.target) else None
    parts = () if tried is None else tried.parts
    return sum((_FORMULAS[part.name](list(part.args), part.out) for part in parts if part.name in _FORMULAS), 0)


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
    return sympy.Add(*(operation_flops(traced, op) for op in traced.operations_within(begin, end)))


class Weights:
    """What operations and tensors weigh at given sizes; sizes that depend on data count as one."""

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

    def operation(self, op: Operation) -> int:
        """How much an operation counts when stages are balanced: its FLOPs, and the elements that it writes."""
        if op.kind != "op":
            return 0
        return max(1, self.number(operation_flops(self._traced, op)) + self.elements(op.spec))


# MERGED: OperationCost: FLOPs, bytes moved and bytes kept of one or more operations, in the symbolic dims.


@dataclass(frozen=True)
class OperationCost:
    """Cost of a forward: FLOPs, bytes read and written, parameters used, activations kept for the backward."""

    flops: Dim = 0
    bytes_moved: Dim = 0
    parameter_bytes: Dim = 0
    saved_bytes: Dim = 0

    def at(self, sizes: Mapping[str, int]) -> OperationCost:
        """The same in numbers, for given sizes of the symbolic dims.

        >>> batch = sympy.Symbol("batch")
        >>> OperationCost(flops=2 * batch, bytes_moved=8).at({"batch": 5})
        OperationCost(flops=10, bytes_moved=8, parameter_bytes=0, saved_bytes=0)
        """
        numbers = (
            _number(each, sizes) for each in (self.flops, self.bytes_moved, self.parameter_bytes, self.saved_bytes)
        )
        return OperationCost(*numbers)


class CostFinder:
    """Finds the costs of the operations of one trace, and of runs of them.

    >>> import torch
    >>> from pipecut import pipeline
    >>> traced = pipeline(torch.nn.Sequential(torch.nn.Linear(8, 4)), (torch.ones(3, 8),)).traced
    >>> finder = CostFinder(traced)
    >>> finder.run(traced.operations)
    OperationCost(flops=64*batch, bytes_moved=48*batch + 144, parameter_bytes=144, saved_bytes=32*batch)
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.memory = MemoryMap(traced)
        self.saved = SavedValues(traced, self.memory)
        names = (name for name, _ in traced.model.named_parameters(remove_duplicate=False))
        self._places = {name: place for place, name in enumerate(names)}

    def operation(self, op: Operation) -> OperationCost:
        """The cost of one operation; 0 for one that does not compute."""
        return self.run((op,))

    def run(self, operations: Iterable[Operation]) -> OperationCost:
        """The cost of operations that are in one stage: parameters and kept values of several operations count once."""
        computed = [op for op in operations if op.kind == "op"]
        kept = {saved.key: saved.bytes for op in computed for saved in self.saved.of(op)}
        parameters = {index for op in computed for index in self.parameters(op)}
        return OperationCost(
            flops=_sum(operation_flops(self.traced, op) for op in computed),
            bytes_moved=_sum(map(self.bytes_moved, operations)),
            parameter_bytes=_sum(bytes_of(self.traced.operations[index]) for index in parameters),
            saved_bytes=_sum(kept.values()),
        )

    def parameters(self, op: Operation) -> tuple[int, ...]:
        """The parameters that an operation uses, buffers aside."""
        return tuple(index for index in dict.fromkeys(op.refs) if self.is_parameter(index))

    def bytes_moved(self, op: Operation) -> Dim:
        """The bytes that an operation reads and writes; a view moves none."""
        if op.kind != "op" or self.memory.is_view(op):
            return 0
        return _MOVED.get(operator_name(op.target), _everything)(self.traced, op)

    def is_parameter(self, index: int) -> bool:
        """Whether a value is a parameter of the model, trained or frozen."""
        return self.place_of_parameter(index) < len(self._places)

    def place_of_parameter(self, index: int) -> int:
        """The number of a parameter in the order of the model's; what is none comes after all of them."""
        names = self.traced.state_names.get(index, ()) if self.traced.operations[index].kind == "state" else ()
        return min((self._places[name] for name in names if name in self._places), default=len(self._places))


def _everything(traced: TracedModel, op: Operation) -> Dim:
    """Each argument read once, the result written once."""
    return _sum([bytes_of(op), *(bytes_of(traced.operations[index]) for index in dict.fromkeys(op.refs))])


def _taken(traced: TracedModel, op: Operation) -> Dim:
    """What is taken from a table, not the table."""
    return 2 * bytes_of(op) + _sum(bytes_of(traced.operations[index]) for index in dict.fromkeys(op.refs[1:]))


def _two_reads(traced: TracedModel, op: Operation) -> Dim:
    """The argument is read a second time, once its sums are known."""
    return _everything(traced, op) + _sum(bytes_of(traced.operations[index]) for index in op.refs[:1])


_MOVED: Mapping[str, Callable[[TracedModel, Operation], Dim]] = {
    **dict.fromkeys(("aten::embedding", "aten::index", "aten::index_select", "aten::gather"), _taken),
    **dict.fromkeys(
        (
            "aten::softmax",
            "aten::log_softmax",
            "aten::layer_norm",
            "aten::rms_norm",
            "aten::batch_norm",
            "aten::group_norm",
            "aten::cross_entropy_loss",
        ),
        _two_reads,
    ),
}


def _sum(values: Iterable[Dim]) -> Dim:
    """A sum that stays a plain number where it can."""
    numbers, expressions = 0, []
    for value in values:
        if isinstance(value, sympy.Basic):
            expressions.append(value)
        else:
            numbers += value
    return sympy.Add(*expressions, numbers) if expressions else numbers


def _number(value: Dim, sizes: Mapping[str, int]) -> int:
    if not isinstance(value, sympy.Basic):
        return int(value)
    return int(value.subs({symbol: sizes.get(str(symbol), 1) for symbol in value.free_symbols}))
