"""Costs of traced operations, as expressions of the symbolic dims: FLOPs, bytes moved, bytes kept; times on a machine.

torch.utils.flop_counter counts while a model runs, on the operators below autograd; a trace holds the operators
above it (linear, scaled_dot_product_attention), with symbolic sizes, and nothing runs. The formulas are those of the
operators' records (`pipe_ir.operators`); an operator without one, made of others, counts as what it is made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ...pipe_ir import Dim, Operation, Ref, TensorSpec, TracedModel, operator_of
from ...torch_internals import is_composite, is_overload, schema_of
from .machine import Machine
from .saved import MemoryMap, SavedValues, bytes_of
from .trial import try_operation

# A weight's gradient is added to what earlier microbatches left: two reads and a write.
_ACCUMULATION_PASSES = 3


def operation_flops(traced: TracedModel, op: Operation) -> Dim:
    """Return the FLOPs of an operation's matrix products and convolutions; 0 for all other operations."""
    if op.kind != "op":
        return 0
    formula = operator_of(op.target).flops
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
    formulas = [(operator_of(part.name).flops, part) for part in parts]
    return sum((formula(part.args, part.out) for formula, part in formulas if formula is not None), 0)


@functools.cache
def _may_hold_products(target: Any) -> bool:
    """Return True if an operator is made of others, and gives back more than a view of what it takes."""
    return (
        is_overload(target)
        and target.namespace == "aten"
        and is_composite(target)
        and not any(result.alias_info for result in schema_of(target).returns)
    )


def flops_between(traced: TracedModel, begin: int, end: int) -> sympy.Expr:
    """Return the floating-point operations of the forward between two ticks."""
    return sympy.Add(*(operation_flops(traced, op) for op in traced.operations_within(begin, end)))


class ConcreteCosts:
    """Numbers at given sizes of the symbolic dims; sizes that depend on data count as one."""

    def __init__(self, traced: TracedModel, sizes: Mapping[str, int]) -> None:
        self._traced = traced
        self._sizes = sizes
        self._numbers: dict[sympy.Basic, int] = {}

    def number(self, dim: Dim) -> int:
        """Return a dim at the given sizes."""
        if isinstance(dim, int):
            return dim
        if dim not in self._numbers:
            known = {symbol: self._sizes.get(str(symbol), 1) for symbol in dim.free_symbols}
            self._numbers[dim] = int(dim.subs(known))
        return self._numbers[dim]

    def elements(self, spec: TensorSpec | None) -> int:
        """Return the elements of a tensor."""
        return 0 if spec is None else math.prod(map(self.number, spec.shape))

    def operation(self, op: Operation) -> int:
        """Return the work of an operation: its FLOPs, and the elements that it writes."""
        if op.kind != "op":
            return 0
        return max(1, self.number(operation_flops(self._traced, op)) + self.elements(op.spec))


@dataclass(frozen=True)
class OperationCost:
    """Cost of a forward: FLOPs, bytes read and written, parameters used, activations kept for the backward."""

    flops: Dim = 0
    bytes_moved: Dim = 0
    parameter_bytes: Dim = 0
    saved_bytes: Dim = 0

    def at(self, sizes: Mapping[str, int]) -> OperationCost:
        """Return the same in numbers, for given sizes of the symbolic dims.

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
        """Return the cost of one operation; 0 for one that does not compute."""
        return self.run((op,))

    def run(self, operations: Iterable[Operation]) -> OperationCost:
        """Return the cost of operations of one stage: parameters and values that several of them keep count once."""
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
        """Return the parameters that an operation uses, buffers aside."""
        return tuple(index for index in dict.fromkeys(op.refs) if self.is_parameter(index))

    def bytes_moved(self, op: Operation) -> Dim:
        """Return the bytes that an operation reads and writes; a view moves none."""
        if op.kind != "op" or self.memory.is_view(op):
            return 0
        reads = operator_of(op.target).reads
        sizes = [bytes_of(self.traced.operations[index]) for index in dict.fromkeys(op.refs)]
        if reads == "lookup":  # what is taken from a table is read, not the table
            return 2 * bytes_of(op) + _sum(sizes[1:])
        return _sum([bytes_of(op), *sizes, *(sizes[:1] if reads == "twice" else ())])

    def is_parameter(self, index: int) -> bool:
        """Return True if a value is a parameter of the model, trained or frozen."""
        return self.place_of_parameter(index) < len(self._places)

    def place_of_parameter(self, index: int) -> int:
        """Return the number of a parameter in the order of the model's; values that are not parameters sort last."""
        names = self.traced.state_names.get(index, ()) if self.traced.operations[index].kind == "state" else ()
        return min((self._places[name] for name in names if name in self._places), default=len(self._places))


@dataclass(frozen=True)
class Times:
    """Seconds of one microbatch: forward, gradients of the inputs, gradients of the weights.

    >>> Times(1.0, 2.0, 3.0) + Times(0.5, 0.5, 0.5)
    Times(forward=1.5, backward_input=2.5, backward_weight=3.5)
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all three."""
        return self.forward + self.backward_input + self.backward_weight

    def __add__(self, other: Times) -> Times:
        return Times(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def scaled(self, forward: float, backward_input: float, backward_weight: float) -> Times:
        """Multiply each part by a factor of its own."""
        return Times(
            self.forward * forward, self.backward_input * backward_input, self.backward_weight * backward_weight
        )


def mean_of(times: Sequence[Times]) -> Times:
    """Return the mean of each part.

    >>> mean_of([Times(1.0, 2.0, 3.0), Times(3.0, 2.0, 5.0)])
    Times(forward=2.0, backward_input=2.0, backward_weight=4.0)
    """
    return sum(times, Times()).scaled(*[1 / len(times)] * 3)


class OperationTimes:
    """Times of the operations of a trace at given sizes, by roofline: the longer of arithmetic and memory."""

    def __init__(self, finder: CostFinder, machine: Machine, sizes: Mapping[str, int]) -> None:
        self.finder, self.machine = finder, machine
        self.traced = finder.traced
        self._costs = ConcreteCosts(self.traced, sizes)
        self._known: dict[Any, Times] = {}
        self._repeated = {
            op.index
            for span in self.traced.spans("checkpoint")
            for op in self.traced.operations_within(span.begin, span.end)
        }

    def of(self, op: Operation) -> Times:
        """Return the times of one operation; a copy of another takes as long, if its arguments are of the same kind."""
        if op.kind != "op":
            return Times()
        weights, trains = self.finder.memory.is_weight, self.finder.saved.index_needs_gradient
        key = (
            op.index if op.like is None else op.like,
            op.index in self._repeated,
            self.finder.memory.is_view(op),
            trains(op.index),
            tuple([(weights[index], trains(index)) for index in op.refs]),
        )
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._computed(op)
        return known

    def _computed(self, op: Operation) -> Times:
        flops = self._costs.number(operation_flops(self.traced, op))
        moved = self._costs.number(self.finder.bytes_moved(op))
        dtype = self._dtype(op)
        forward = self.machine.time(flops, moved, dtype)
        if not self.finder.saved.needs_gradient(op):
            return Times(forward)
        values, weights = self._gradients(op)
        again = forward if op.index in self._repeated else 0.0
        operator = operator_of(op.target)
        if flops:
            each = operator.backward_flops
            backward = self.machine.time(flops * each, moved * each, dtype)
            return Times(
                forward, again + backward * len(values), (backward if weights else 0.0) + self._accumulation(weights)
            )
        backward = self.machine.time(0, moved * operator.backward_bytes, dtype)
        if values:
            return Times(forward, again + backward, self._accumulation(weights))
        return Times(forward, again, backward + self._accumulation(weights))

    def _gradients(self, op: Operation) -> tuple[list[int], list[int]]:
        """Return the arguments that get a gradient: activations, and weights or what is made of them alone."""
        needing = [index for index in dict.fromkeys(op.refs) if self.finder.saved.index_needs_gradient(index)]
        if op.spec is not None and not needing:
            needing = [index for index in op.refs if self.traced.operations[index].spec is None]
        is_weight = self.finder.memory.is_weight
        return [each for each in needing if not is_weight[each]], [each for each in needing if is_weight[each]]

    def _accumulation(self, weights: list[int]) -> float:
        size = sum(self._costs.number(bytes_of(self.traced.operations[index])) for index in weights)
        return _ACCUMULATION_PASSES * size / self.machine.memory_bandwidth

    def _dtype(self, op: Operation) -> torch.dtype:
        spec = op.spec
        if spec is None:
            spec = next((self.traced.operations[index].spec for index in op.refs), None)
        if op.context.autocast and op.context.autocast[-1].enabled:
            return op.context.autocast[-1].dtype
        return torch.float32 if spec is None else spec.dtype


def _sum(values: Iterable[Dim]) -> Dim:
    """Return a sum that stays a plain number where it can."""
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
