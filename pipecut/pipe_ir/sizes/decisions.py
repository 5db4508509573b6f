"""Decisions of a model's code about symbolic sizes while it is traced, with their calls and lines."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch

from ...torch_internals import asks_for_plain_number, traced_operator, watch_size_decisions
from ..operators import operator_name, operator_of
from ..tracing.records import OpenSpan
from ..tracing.user_code import user_line

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])


def _is_about_layout(expr: sympy.Basic, answer: Any) -> bool:
    """Return True if a question concerns the layout of tensors, and has the answer of all sizes but 0 and 1.

    Whether a tensor is contiguous depends on the dims of size 1. torch asks that to know the result of an operation.
    The operation itself is in the trace, and asks again when it runs.
    """
    return _is_general(expr, answer) and _is_asked_by_torch(_says_unequal(expr, answer))


def _says_unequal(expr: sympy.Basic, answer: Any) -> bool:
    return isinstance(expr, sympy.Ne if answer else sympy.Eq)


@functools.lru_cache(maxsize=4096)
def _is_general(expr: sympy.Basic, answer: Any) -> bool:
    symbols = sorted(expr.free_symbols, key=str)
    large = {symbol: sympy.prime(1000 + nth) for nth, symbol in enumerate(symbols)}
    return bool(expr.subs(large) == answer)


def _is_asked_by_torch(unequal: bool) -> bool:
    """Return True if an operation asks, or a method of a tensor that makes no operation, like contiguous().

    An operation that asks whether a size is 1, and is told no, gives a result whose shape is right for 1 too: a size
    that is broadcast has been tied to the other one. Only squeeze is different. What else is asked may decide on a
    shape, as in `x[:2]`.
    """
    frame: FrameType | None = sys._getframe(2)
    by_python = False
    while frame is not None:
        operator = traced_operator(frame)
        if operator is not None:
            squeezes = operator_name(operator) == "aten::squeeze"
            return operator_of(operator).shape_by_arithmetic or (unequal and not squeezes)
        if not frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)):
            return not by_python
        by_python = by_python or asks_for_plain_number(frame)
        frame = frame.f_back
    return False


class SizeDecisions:
    """Recorder of the decisions of one trace.

    `made` are the decisions, an expression and the answer, with the calls in which they were made; `lines` the lines of
    code; `replaced` what symbols turned out to be, and where; `input_sizes` the sizes of the inputs at the beginning.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, Any], dict[int, OpenSpan]] = {}
        self.lines: dict[tuple[Any, Any, int], str] = {}
        self.replaced: dict[Any, tuple[Any, str]] = {}
        self.input_sizes: list[tuple[Any, ...]] = []
        self._shape_env: Any = None

    def listen(self, tensors: Sequence[torch.Tensor], open_spans: Sequence[OpenSpan]) -> None:
        """Record the decisions in the innermost of the open spans, also those that torch knows the answer to by now."""
        environments = (tensor.fake_mode.shape_env for tensor in tensors if hasattr(tensor, "fake_mode"))
        self._shape_env = next(environments, None)
        if self._shape_env is None:
            return
        self.input_sizes = [tuple(_expression(size) for size in tensor.shape) for tensor in tensors]

        def note_replaced(symbol: sympy.Symbol, value: sympy.Basic) -> None:
            self.replaced[symbol] = (value, user_line())

        def note_decided(expr: sympy.Basic, answer: Any) -> None:
            if open_spans:
                self._note(expr, answer, open_spans[-1])

        watch_size_decisions(self._shape_env, note_replaced, note_decided)

    @property
    def replacements(self) -> dict[Any, Any]:
        """Values that torch has found for symbolic sizes."""
        return {} if self._shape_env is None else dict(self._shape_env.replacements)

    def _note(self, expr: Any, answer: Any, span: OpenSpan) -> None:
        spans = self.made.get((expr, answer), {})
        if id(span) not in spans and not _is_about_layout(expr, answer):
            self.made[expr, answer] = {**spans, id(span): span}
            self.lines[expr, answer, id(span)] = user_line()


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
