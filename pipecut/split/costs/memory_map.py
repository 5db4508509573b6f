"""Which values of a trace lie in the same memory, and how much of it they hold on to."""

from __future__ import annotations

import math

from ...pipe_ir.effects import PASS_THROUGH, operator_name
from ...pipe_ir.spec import Dim
from ...pipe_ir.traced import Step, TracedModel


def bytes_of(step: Step) -> Dim:
    """The bytes of the tensor that a step makes, as an expression of the symbolic dims."""
    return 0 if step.spec is None else math.prod(step.spec.shape) * step.spec.dtype.itemsize


class MemoryMap:
    """For each step the step that made its memory, and whether it holds nothing but parameters, buffers, constants.

    A view keeps all of the memory alive that it looks at, so that memory is counted by who made it.
    """

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self.maker: list[int] = []
        self.is_weight: list[bool] = []
        latest: dict[int | None, int] = {}
        for step in traced.steps:
            maker = step.index if step.storage is None or makes_new_memory(step) else latest.get(step.storage)
            if maker is None:
                maker = next((self.maker[ref] for ref in step.refs if traced.steps[ref].storage == step.storage), None)
            maker = step.index if maker is None else maker
            latest[step.storage] = maker
            self.maker.append(maker)
            self.is_weight.append(_is_weight(step, self.is_weight))

    def is_view(self, step: Step) -> bool:
        """Whether a step only looks at memory that was there before."""
        return step.kind == "op" and self.maker[step.index] != step.index and not step.writes

    def is_activation(self, index: int) -> bool:
        """Whether a value takes memory in each microbatch: a parameter, a buffer or a view of one does not."""
        return (
            self._traced.steps[self.maker[index]].kind in ("op", "input") and self._traced.steps[index].kind != "mark"
        )

    def held(self, index: int) -> Dim:
        """The bytes that a value keeps alive."""
        return bytes_of(self._traced.steps[self.maker[index]])


def makes_new_memory(step: Step) -> bool:
    """Whether an operation that may hand back its argument (dropout) has work to do here."""
    if operator_name(step.target) not in PASS_THROUGH or len(step.args) < 3:
        return False
    return bool(step.args[2]) and step.args[1] != 0


def _is_weight(step: Step, known: list[bool]) -> bool:
    if step.kind != "op":
        return step.kind in ("state", "constant")
    return bool(step.refs) and all(known[index] for index in step.refs)
