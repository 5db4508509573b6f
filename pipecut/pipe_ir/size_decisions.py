"""What a model's code decides about symbolic sizes while it is traced, in which call and on which line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .layout_questions import is_about_layout
from .seen import OpenSpan
from .user_line import user_line


class SizeDecisions:
    """Listens to one trace.

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
        """Note what is decided, in the innermost of the open spans, also where torch knows the answer by now."""
        environments = (tensor.fake_mode.shape_env for tensor in tensors if hasattr(tensor, "fake_mode"))
        self._shape_env = next(environments, None)
        if self._shape_env is None:
            return
        self.input_sizes = [tuple(_expression(size) for size in tensor.shape) for tensor in tensors]
        decide, replacements = self._shape_env.evaluate_sym_node, self._shape_env.replacements

        def decide_and_note(node: Any, *args: Any, **kwargs: Any) -> Any:
            expr, known = node.expr, len(replacements)
            answer = decide(node, *args, **kwargs)
            for symbol in itertools.islice(replacements, known, None):
                self.replaced[symbol] = (replacements[symbol], user_line())
            if open_spans and kwargs.get("fallback_value") is None and getattr(expr, "free_symbols", None):
                self._note(expr, answer, open_spans[-1])
            return answer

        self._shape_env.evaluate_sym_node = decide_and_note

    @property
    def replacements(self) -> dict[Any, Any]:
        """What torch has found symbolic sizes to be."""
        return {} if self._shape_env is None else dict(self._shape_env.replacements)

    def _note(self, expr: Any, answer: Any, span: OpenSpan) -> None:
        spans = self.made.get((expr, answer), {})
        if id(span) not in spans and not is_about_layout(expr, answer):
            self.made[expr, answer] = {**spans, id(span): span}
            self.lines[expr, answer, id(span)] = user_line()


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
