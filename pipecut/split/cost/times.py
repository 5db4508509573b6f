"""Times of operations on a machine, by roofline: the longer of arithmetic and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...pipe_ir import Operation, operator_of
from .machine import Machine
from .operation import ConcreteCosts, CostFinder, operation_flops
from .saved import bytes_of

# A weight's gradient is added to what earlier microbatches left: two reads and a write.
_ACCUMULATION_PASSES = 3


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
        self._repeated = {
            op.index
            for span in self.traced.spans("checkpoint")
            for op in self.traced.operations_within(span.begin, span.end)
        }

    def of(self, op: Operation) -> Times:
        """Return the times of one operation."""
        if op.kind != "op":
            return Times()
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
