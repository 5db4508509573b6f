"""Comparison of two traces of one model: with calls of equal modules computed once, and with all of them computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from pipecut.pipe_ir import (
    Called,
    Entered,
    History,
    ModelTracer,
    Operation,
    Span,
    Template,
    TensorNumber,
    TracedModel,
    flatten,
)
from pipecut.pipe_ir.tracing.replay import Replays
from pipecut.split.outside import find_difference


def traced_in_both_ways(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    reset: Callable[[], None] = lambda: None,
) -> tuple[ModelTracer, tuple[TracedModel, Replays]]:
    """Trace and run a model with repeated calls computed once and computed all; compare; return the first of both.

    `reset` puts back state of Python's that the model counts in.
    """
    found = []
    for all_of_them in (False, True):
        tracer = ModelTracer("export", model, args, kwargs)
        tracer._computes_repeats = all_of_them
        reset()
        traced = tracer.trace()
        found.append((tracer, traced, tracer.replays(traced)))
    (tracer, traced, again), (_, full, full_again) = found
    assert_same_trace(traced, full)
    assert [run.error for run in again.runs] == [run.error for run in full_again.runs]
    for run, other in zip(again.runs, full_again.runs, strict=True):
        assert_same_history(run.history, other.history)
    assert str(find_difference(traced, (), again.runs)) == str(find_difference(full, (), full_again.runs))
    return tracer, (traced, again)


def assert_same_trace(one: TracedModel, other: TracedModel) -> None:
    """Check that two traces are equal, apart from the numbers of memories and of ticks."""
    assert [op.name for op in one.operations] == [op.name for op in other.operations]
    ranks = _ranks(one), _ranks(other)
    memories = _Renaming()
    for mine, theirs in zip(one.operations, other.operations, strict=True):
        for entry in fields(Operation):
            a, b = getattr(mine, entry.name), getattr(theirs, entry.name)
            if entry.name == "like":
                assert a is None or one.operations[a].target == mine.target, mine.name
            elif entry.name == "tick":
                assert ranks[0].get(a) == ranks[1].get(b), mine.name
            elif entry.name == "storage":
                assert memories.agree(a, b), mine.name
            elif entry.name == "constant" and isinstance(a, Tensor):
                assert torch.equal(a, b)
            elif entry.name != "constant" and not (entry.name == "target" and mine.kind == "constant"):
                assert a == b, (mine.name, entry.name, a, b)
    assert _span(one.root, ranks[0]) == _span(other.root, ranks[1])
    assert _conditions(one, ranks[0]) == _conditions(other, ranks[1])
    assert _template(one.output) == _template(other.output)
    for name in ("inputs", "dims", "hints", "state_names", "training"):
        a, b = getattr(one, name), getattr(other, name)
        assert _shown(a) == _shown(b), name
    for name in (
        "mode_readers",
        "reached_state",
        "assigned_attributes",
        "named_dims",
        "fixed_dims",
        "autocast",
        "draws",
        "fallbacks",
    ):
        assert getattr(one, name) == getattr(other, name), name
    assert one.history is not None
    assert other.history is not None
    assert_same_history(one.history, other.history)


def assert_same_history(one: History, other: History) -> None:
    """Check that two histories are equal, apart from the numbers of tensors and memories."""
    tensors, memories = _Renaming(), _Renaming()
    events, other_events = list(one.all_events()), list(other.all_events())
    assert len(events) == len(other_events)
    assert all(tensors.agree(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))
    assert one.state.keys() == other.state.keys()
    assert all(tensors.agree(one.state[name], other.state[name]) for name in one.state)
    for mine, theirs in zip(events, other_events, strict=True):
        assert type(mine) is type(theirs)
        for entry in fields(mine):
            a, b = getattr(mine, entry.name), getattr(theirs, entry.name)
            if entry.name == "storages":
                assert len(a) == len(b)
                for (tensor, memory), (other_tensor, other_memory) in zip(a, b, strict=True):
                    assert tensors.agree(tensor, other_tensor), mine
                    assert memories.agree(memory, other_memory), mine
            elif entry.name in ("args", "made", "written", "passed_on", "result", "handed_on"):
                numbered = isinstance(mine, Called | Entered) and entry.name == "args" or entry.name == "result"
                assert _agree(a, b, tensors, bare=not numbered), (mine, theirs)
            elif entry.name == "buffers":
                assert [(name, tensors.agree(n, m)) for (name, n), (_, m) in zip(a, b, strict=True)] == [
                    (name, True) for name, _ in b
                ]
            else:
                assert a == b, (mine, theirs)
    assert set(one.effects) == set(other.effects)


class _Renaming:
    """A one-to-one relation between the numbers of two traces."""

    def __init__(self) -> None:
        self._there: dict[Any, Any] = {}
        self._back: dict[Any, Any] = {}

    def agree(self, one: Any, other: Any) -> bool:
        if one is None or other is None:
            return one is other
        return self._there.setdefault(one, other) == other and self._back.setdefault(other, one) == one


def _agree(one: Any, other: Any, tensors: _Renaming, *, bare: bool) -> bool:
    if isinstance(one, TensorNumber):
        return isinstance(other, TensorNumber) and tensors.agree(one.number, other.number)
    if isinstance(one, dict):
        return len(one) == len(other) and _agree(tuple(one.items()), tuple(other.items()), tensors, bare=bare)
    if isinstance(one, tuple):
        return (
            isinstance(other, tuple)
            and len(one) == len(other)
            and all(_agree(a, b, tensors, bare=bare) for a, b in zip(one, other, strict=True))
        )
    return tensors.agree(one, other) if bare and isinstance(one, int) else bool(one == other)


def _ranks(traced: TracedModel) -> dict[int, int]:
    """Return the order of all ticks that count."""
    ticks = {op.tick for op in traced.operations if op.tick >= 0}
    ticks |= {tick for span in traced.spans() for tick in (span.begin, span.end)}
    return {tick: rank for rank, tick in enumerate(sorted(ticks))}


def _span(span: Span, ranks: Mapping[int, int]) -> Any:
    return (
        (span.kind, span.path, span.nth_call, ranks[span.begin], ranks[span.end], span.context),
        (_template(span.args), _template(span.result), span.assigned_buffers, _shown(span.options)),
        [_span(child, ranks) for child in span.children],
    )


def _conditions(traced: TracedModel, ranks: Mapping[int, int]) -> set[Any]:
    return {(each.holds, each.source, ranks[each.span_begin]) for each in traced.conditions}


def _template(template: Template) -> Any:
    return list(template.structure.paths()), _shown(template.leaves)


def _shown(value: Any) -> str:
    return repr(flatten(value)[0])
