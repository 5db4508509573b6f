"""How long a step takes on a machine: its forward, and its backward for the inputs and for the weights apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...pipe_ir.effects import operator_name
from ...pipe_ir.traced import Step
from ..cost import Weights, step_flops
from .machine import Machine
from .memory_map import bytes_of
from .step_cost import CostFinder

# The backward of an elementwise operation reads the gradient and what was kept, and writes a gradient.
BACKWARD_BYTES = 1.5

# Attention runs its forward once more in the backward, and has four products there instead of two.
ATTENTION_BACKWARD = 2.5

# A weight's gradient is added to what earlier microbatches left: two reads and a write.
ACCUMULATED = 3

TABLES = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")


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
        """All three."""
        return self.forward + self.backward_input + self.backward_weight

    def __add__(self, other: Times) -> Times:
        return Times(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def scaled(self, forward: float, backward_input: float, backward_weight: float) -> Times:
        """Each part by a factor of its own."""
        return Times(
            self.forward * forward, self.backward_input * backward_input, self.backward_weight * backward_weight
        )


def mean_of(times: Sequence[Times]) -> Times:
    """The mean of each part.

    >>> mean_of([Times(1.0, 2.0, 3.0), Times(3.0, 2.0, 5.0)])
    Times(forward=2.0, backward_input=2.0, backward_weight=4.0)
    """
    return sum(times, Times()).scaled(*[1 / len(times)] * 3)


class StepTimes:
    """The times of the steps of a trace at given sizes, by roofline: as long as the arithmetic or the memory takes."""

    def __init__(self, finder: CostFinder, machine: Machine, sizes: Mapping[str, int]) -> None:
        self.finder, self.machine = finder, machine
        self.traced = finder.traced
        self._weigh = Weights(self.traced, sizes)
        self._repeated = {
            step.index
            for span in self.traced.spans("checkpoint")
            for step in self.traced.steps_within(span.begin, span.end)
        }

    def of(self, step: Step) -> Times:
        """The times of one step."""
        if step.kind != "op":
            return Times()
        flops = self._weigh.number(step_flops(self.traced, step))
        moved = self._weigh.number(self.finder.bytes_moved(step))
        dtype = self._dtype(step)
        forward = self.machine.time(flops, moved, dtype)
        if not self.finder.saved.needs_gradient(step):
            return Times(forward)
        values, weights = self._gradients(step)
        again = forward if step.index in self._repeated else 0.0
        name = operator_name(step.target)
        if flops:
            each = ATTENTION_BACKWARD / 3 if name.endswith("attention") else 1.0
            backward = self.machine.time(flops * each, moved * each, dtype)
            return Times(
                forward, again + backward * len(values), (backward if weights else 0.0) + self._accumulation(weights)
            )
        factor = 1.0 if name in TABLES else BACKWARD_BYTES
        backward = self.machine.time(0, moved * factor, dtype)
        if values:
            return Times(forward, again + backward, self._accumulation(weights))
        return Times(forward, again, backward + self._accumulation(weights))

    def _gradients(self, step: Step) -> tuple[list[int], list[int]]:
        """The arguments that get a gradient: activations, and weights or what is made of them alone."""
        needing = [index for index in dict.fromkeys(step.refs) if self.finder.saved.index_needs_gradient(index)]
        if step.spec is not None and not needing:
            needing = [index for index in step.refs if self.traced.steps[index].spec is None]
        is_weight = self.finder.memory.is_weight
        return [each for each in needing if not is_weight[each]], [each for each in needing if is_weight[each]]

    def _accumulation(self, weights: list[int]) -> float:
        size = sum(self._weigh.number(bytes_of(self.traced.steps[index])) for index in weights)
        return ACCUMULATED * size / self.machine.memory_bandwidth

    def _dtype(self, step: Step) -> torch.dtype:
        spec = step.spec
        if spec is None:
            spec = next((self.traced.steps[index].spec for index in step.refs), None)
        if step.context.autocast and step.context.autocast[-1].enabled:
            return step.context.autocast[-1].dtype
        return torch.float32 if spec is None else spec.dtype
