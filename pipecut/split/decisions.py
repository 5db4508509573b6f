"""Decisions about sizes: those of generated code stand, those of whole modules are taken anew at every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import PipeError
from ..pipe_ir.traced import Condition, Span, TracedModel
from .program import Piece, WholeCall, walk


def conditions_of_generated_code(traced: TracedModel, programs: Sequence[Piece]) -> tuple[Condition, ...]:
    """The conditions that a call must meet, each once."""
    whole = [item.span for program in programs for item in walk(program.items) if isinstance(item, WholeCall)]
    kept = [condition for condition in traced.conditions if not any(_covers(span, condition) for span in whole)]
    return tuple({condition.holds: condition for condition in reversed(kept)}.values())


def decides_about_sizes(traced: TracedModel, span: Span) -> bool:
    """Whether the code of a call looks at sizes, so that its results may have other shapes in another call."""
    return any(_covers(span, condition) for condition in traced.conditions)


def _covers(span: Span, condition: Condition) -> bool:
    return span.begin <= condition.span_begin < span.end


def require_shape(tensor: Any, shape: tuple[int, ...], label: str) -> Any:
    """Called by generated code: the code around a module counts on the shapes that it returned in the trace."""
    if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) != shape:
        raise PipeError(
            f"{label!r} returned a tensor {list(tensor.shape)}, where the trace has {list(shape)} for these inputs; it "
            "decides about sizes: call pipeline() with an example of this size"
        )
    return tensor
