"""What ranks that plan together must agree on, as short texts that can be sent and shown."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..pipe_ir.structure import flatten
from ..pipe_ir.traced import TracedModel
from .training_plan import Source, fingerprint

PLAIN = (bool, int, float, str, type(None))


def facts_of(asked: Mapping[str, object], traced: TracedModel, source: Source) -> dict[str, str]:
    """The facts by their names; the first that differs is shown."""
    model, args, kwargs = source
    facts = {"the model": fingerprint(model), "the mode of the model": _mode(model)}
    facts |= {name: _text(value) for name, value in asked.items()}
    facts["the example"] = ", ".join(map(_leaf, flatten((args, kwargs))[0]))
    # Two models may have the same parameters, and compute other things with them.
    operations = [_operation(step.target) for step in traced.steps if step.kind == "op"]
    spans = [f"{span.kind} {span.label}" for span in traced.spans()]
    facts["what was traced"] = f"{len(operations)} operations ({_digest([*operations, *spans])})"
    return facts


def _text(value: object) -> str:
    """A list and a tuple of the same are the same."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _mode(model: nn.Module) -> str:
    evaluated = [name for name, module in model.named_modules() if not module.training]
    if not evaluated:
        return "training"
    if len(evaluated) == sum(1 for _ in model.modules()):
        return "evaluation"
    return f"evaluation in {len(evaluated)} modules, {evaluated[0]!r} among them ({_digest(evaluated)})"


def _leaf(value: Any) -> str:
    """Values of tensors may differ; what the trace fixes may not."""
    if isinstance(value, Tensor):
        gradient = " with a gradient" if value.requires_grad else ""
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{gradient}"
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__


def _operation(target: Any) -> str:
    """No address in memory, as the text of a callable may have it."""
    return str(getattr(target, "__name__", type(target).__name__))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
