"""Turns the nodes and spans of a finished trace into a TracedModel."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from .ambient import ambient_autocast
from .conditions import find_conditions
from .drafts import Drafts
from .fixed_dims import find_fixed_dims
from .inputs import Example
from .recorder import Recorder
from .same_sizes import same_sizes
from .seen import OpenSpan, SeenTensor
from .symbols import Symbols, hints_of, names_of
from .traced import Context, Span, Step, TracedInput, TracedModel


def freeze(model: nn.Module, example: Example, run: Recorder, training: bool) -> TracedModel:
    """All of a trace as frozen values, independent of the tracer."""
    return _Freezer(model, example, run, training).traced()


class _Freezer:
    def __init__(self, model: nn.Module, example: Example, run: Recorder, training: bool) -> None:
        assert run.root is not None
        self.model, self.example, self.run, self.training = model, example, run, training
        self.root = run.root
        names = _input_names(example)
        values = [seen.node.meta["val"] for seen in run.inputs]
        dim_names = example.dynamic.names
        same = same_sizes(
            run.nodes,
            [seen.node for seen in run.inputs],
            hints_of(values, example.tensors),
            names_of(values, dim_names),
        )
        shapes = [tuple(tensor.shape) for tensor in example.tensors]
        inputs = list(zip(names, values, strict=True))
        self.symbols = Symbols(
            inputs, {**run.decisions.replacements, **same}, example.dynamic, shapes, run.decisions.made
        )
        self.device = _device(model, example)
        input_names = {seen.node: name for seen, name in zip(run.inputs, names, strict=True)}
        self.drafts = Drafts(model, run, self.symbols, input_names, self.device)
        self.span_ticks: dict[int, tuple[int, int]] = {}
        self.span_contexts: dict[int, Context] = {}

    def traced(self) -> TracedModel:
        self._walk_timeline()
        root = self._span(self.root)
        output = self.run.output.converted(self.drafts.leaf)
        steps, index = self.drafts.finished(), self.drafts.index
        input_steps = [index[seen.node] for seen in self.run.inputs]
        inputs = self._inputs(input_steps, steps)
        return TracedModel(
            steps=steps,
            root=root,
            inputs=inputs,
            signature=self.example.signature,
            output=output,
            dims={symbol: (input_steps[at], dim) for symbol, (at, dim) in self.symbols.origin.items()},
            hints={
                str(symbol): self.example.tensors[at].shape[dim] for symbol, (at, dim) in self.symbols.origin.items()
            },
            state_names={index[node]: tuple(names) for node, names in self.drafts.state.items() if node in index},
            device=self.device,
            model=self.model,
            training=self.training,
            conditions=find_conditions(self.run, self.symbols, steps, self.span_ticks),
            reached_state=frozenset(index[node] for node in self.drafts.reached),
            mode_readers=frozenset(self.run.mode_readers),
            assigned_attributes=self.run.assigned_attributes,
            forgotten=self.run.forgotten,
            named_dims=tuple(sorted(self.symbols.named)),
            fixed_dims=find_fixed_dims(self.run, self.example.dynamic, inputs, input_steps),
            autocast=ambient_autocast(),
        )

    def _walk_timeline(self) -> None:
        """Give every node, and every begin and end of a span, its tick."""
        pending = iter(_events(self.root))
        event = next(pending, None)
        tick = 0
        for position, node in enumerate(self.run.nodes):
            while event is not None and event[0] <= position:
                self._note_event(event, tick)
                tick, event = tick + 1, next(pending, None)
            self.drafts.note(node, tick)
            tick += 1
        while event is not None:
            self._note_event(event, tick)
            tick, event = tick + 1, next(pending, None)

    def _note_event(self, event: tuple[int, OpenSpan, bool], tick: int) -> None:
        _, span, begins = event
        if begins:
            self.span_ticks[id(span)] = (tick, -1)
            self.span_contexts[id(span)] = self.drafts.modes.context
        else:
            self.span_ticks[id(span)] = (self.span_ticks[id(span)][0], tick)
        for leaf in (span.args if begins else span.result).leaves:
            if isinstance(leaf, SeenTensor):
                self.drafts.correct(leaf)

    def _span(self, span: OpenSpan) -> Span:
        begin, end = self.span_ticks[id(span)]
        children = tuple(self._span(child) for child in span.children)
        return Span(
            kind=span.kind,
            path=span.path,
            nth_call=span.nth_call,
            begin=begin,
            end=end,
            args=span.args.converted(self.drafts.leaf),
            result=span.result.converted(self.drafts.leaf),
            context=self.span_contexts[id(span)],
            children=children,
            options=span.options,
            assigned_buffers={name: self.drafts.index[seen.node] for name, seen in span.assigned_buffers.items()},
        )

    def _inputs(self, input_steps: list[int], steps: tuple[Step, ...]) -> tuple[TracedInput, ...]:
        order = [nth for nth, leaf in enumerate(self.example.leaves) if isinstance(leaf, torch.Tensor)]
        step_of = dict(zip(order, input_steps, strict=True))
        return tuple(
            TracedInput(path, _identifier(path), step_of[nth], spec=steps[step_of[nth]].spec)
            if nth in step_of
            else TracedInput(path, _identifier(path), None, value)
            for path, nth, value in self.example.named
        )


def _events(span: OpenSpan) -> Iterator[tuple[int, OpenSpan, bool]]:
    yield span.begin, span, True
    for child in span.children:
        yield from _events(child)
    yield span.end, span, False


def _input_names(example: Example) -> list[str]:
    by_leaf = {nth: path for path, nth, _ in example.named if nth is not None}
    return [_identifier(by_leaf[nth]) for nth, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor)]


def _identifier(path: str) -> str:
    return re.sub(r"\W+", "_", path).strip("_") or "input"


def _device(model: nn.Module, example: Example) -> torch.device:
    state = (*model.parameters(), *model.buffers())
    if any(tensor.device.type == "meta" for tensor in state):
        return torch.device("cpu")  # the device of the stand-ins that a model without memory is traced with
    return next((tensor.device for tensor in (*example.tensors, *state)), torch.device("cpu"))
