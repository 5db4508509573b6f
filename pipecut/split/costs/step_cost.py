"""StepCost: what a step, or a run of them, computes, moves and keeps, as expressions of the symbolic dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import sympy

from ...pipe_ir.effects import operator_name
from ...pipe_ir.spec import Dim
from ...pipe_ir.traced import Step, TracedModel
from ..cost import step_flops
from .memory_map import MemoryMap, bytes_of
from .saved import SavedValues


@dataclass(frozen=True)
class StepCost:
    """The forward of a step: operations, bytes read and written, parameters used, activations kept for backward."""

    flops: Dim = 0
    bytes_moved: Dim = 0
    parameter_bytes: Dim = 0
    saved_bytes: Dim = 0

    def at(self, sizes: Mapping[str, int]) -> StepCost:
        """The same in numbers, for given sizes of the symbolic dims.

        >>> batch = sympy.Symbol("batch")
        >>> StepCost(flops=2 * batch, bytes_moved=8).at({"batch": 5})
        StepCost(flops=10, bytes_moved=8, parameter_bytes=0, saved_bytes=0)
        """
        numbers = (
            _number(each, sizes) for each in (self.flops, self.bytes_moved, self.parameter_bytes, self.saved_bytes)
        )
        return StepCost(*numbers)


class CostFinder:
    """Finds the costs of the steps of one trace, and of runs of them.

    >>> import torch
    >>> from pipecut import pipeline
    >>> traced = pipeline(torch.nn.Sequential(torch.nn.Linear(8, 4)), (torch.ones(3, 8),)).traced
    >>> finder = CostFinder(traced)
    >>> finder.run(traced.steps)
    StepCost(flops=64*batch, bytes_moved=48*batch + 144, parameter_bytes=144, saved_bytes=32*batch)
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.memory = MemoryMap(traced)
        self.saved = SavedValues(traced, self.memory)
        names = (name for name, _ in traced.model.named_parameters(remove_duplicate=False))
        self._places = {name: place for place, name in enumerate(names)}

    def step(self, step: Step) -> StepCost:
        """The cost of one step; 0 for one that does not compute."""
        return self.run((step,))

    def run(self, steps: Iterable[Step]) -> StepCost:
        """The cost of steps that are in one stage: parameters and kept values of several steps count once."""
        operations = [step for step in steps if step.kind == "op"]
        kept = {saved.key: saved.bytes for step in operations for saved in self.saved.of(step)}
        parameters = {index for step in operations for index in self.parameters(step)}
        return StepCost(
            flops=_sum(step_flops(self.traced, step) for step in operations),
            bytes_moved=_sum(map(self.bytes_moved, operations)),
            parameter_bytes=_sum(bytes_of(self.traced.steps[index]) for index in parameters),
            saved_bytes=_sum(kept.values()),
        )

    def parameters(self, step: Step) -> tuple[int, ...]:
        """The parameters that a step uses, buffers aside."""
        return tuple(index for index in dict.fromkeys(step.refs) if self.is_parameter(index))

    def bytes_moved(self, step: Step) -> Dim:
        """The bytes that a step reads and writes; a view moves none."""
        if step.kind != "op" or self.memory.is_view(step):
            return 0
        return MOVED.get(operator_name(step.target), _everything)(self.traced, step)

    def is_parameter(self, index: int) -> bool:
        """Whether a value is a parameter of the model, trained or frozen."""
        return self.place_of_parameter(index) < len(self._places)

    def place_of_parameter(self, index: int) -> int:
        """The number of a parameter in the order of the model's; what is none comes after all of them."""
        names = self.traced.state_names.get(index, ()) if self.traced.steps[index].kind == "state" else ()
        return min((self._places[name] for name in names if name in self._places), default=len(self._places))


def _everything(traced: TracedModel, step: Step) -> Dim:
    """Each argument read once, the result written once."""
    return _sum([bytes_of(step), *(bytes_of(traced.steps[index]) for index in dict.fromkeys(step.refs))])


def _taken(traced: TracedModel, step: Step) -> Dim:
    """What is taken from a table, not the table."""
    return 2 * bytes_of(step) + _sum(bytes_of(traced.steps[index]) for index in dict.fromkeys(step.refs[1:]))


def _two_reads(traced: TracedModel, step: Step) -> Dim:
    """The argument is read a second time, once its sums are known."""
    return _everything(traced, step) + _sum(bytes_of(traced.steps[index]) for index in step.refs[:1])


MOVED: Mapping[str, Callable[[TracedModel, Step], Dim]] = {
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
