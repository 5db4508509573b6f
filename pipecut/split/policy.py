"""Cuts by a `split_policy`: a function that gets the traced model as a GraphModule and inserts marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import SplitError
from ..pipe_ir.marker import is_mark
from ..pipe_ir.traced import HERE, Ref, Size, Step, TracedModel
from .cost import Weights
from .points import Cut, SplitPlan, calls_around, checked_plan

SplitPolicy = Callable[[GraphModule], GraphModule]
_STEP = "pipecut_step"


def cuts_by_policy(traced: TracedModel, policy: SplitPolicy) -> SplitPlan:
    """Show the policy the traced model, and cut where it put marks."""
    answer = policy(as_graph_module(traced))
    if not isinstance(answer, GraphModule):
        raise SplitError(
            f"split_policy returned {type(answer).__name__}; it must return a GraphModule: the one that it got, with "
            "marks inserted by graph.call_function(pipe_split)"
        )
    return checked_plan(traced, [_cut_at(traced, node) for node in answer.graph.nodes if is_mark(node.target)])


def _cut_at(traced: TracedModel, mark: Node) -> Cut:
    before = _nearest_step(traced, mark, lambda node: node.prev)
    after = _nearest_step(traced, mark, lambda node: node.next)
    begin = traced.root.begin if before is None else before.tick
    end = traced.root.end if after is None else after.tick
    # Calls that end between the two steps are over at the mark; calls that begin there have not begun.
    over = [span.end for span in traced.spans("call") if span.begin <= begin < span.end < end]
    tick = max(over, default=begin) + 1
    label = f"the split_policy's mark {f'before {after.name}' if after else 'at the end'}"
    return Cut(tick, label, calls_around(traced.root, tick)[-1].path)


def _nearest_step(traced: TracedModel, node: Node, move: Callable[[Node], Node]) -> Step | None:
    node = move(node)
    while node.op != "root":
        if _STEP in node.meta:
            index: int = node.meta[_STEP]
            return traced.steps[index]
        node = move(node)
    return None


def as_graph_module(traced: TracedModel) -> GraphModule:
    """The trace as a plain GraphModule to look at: parameters as get_attr, sizes as in the example inputs."""
    graph = Graph()
    at = Weights(traced, traced.hints)
    attributes: dict[str, Any] = {}
    nodes: dict[int, Node] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, Ref):
            return nodes[value.index]
        if isinstance(value, Size):
            return at.number(value.expr)
        if isinstance(value, tuple | list):
            return type(value)(argument(item) for item in value)
        return traced.device if value is HERE else value

    def add(step: Step) -> Node:
        if step.kind == "input":
            return graph.placeholder(step.name)
        if step.kind in ("state", "constant"):
            attributes[step.target] = _tensor(traced, step)
            return graph.get_attr(step.target)
        kwargs = {key: argument(value) for key, value in step.kwargs.items()}
        return graph.create_node("call_function", step.target, tuple(map(argument, step.args)), kwargs, name=step.name)

    for step in sorted(traced.steps, key=lambda step: step.tick):
        node = nodes[step.index] = add(step)
        if step.spec is not None:
            shape = list(map(at.number, step.spec.shape))
            node.meta["val"] = torch.empty(shape, dtype=step.spec.dtype, device="meta")
        if step.kind == "op":
            node.meta[_STEP] = step.index
            around = calls_around(traced.root, step.tick)
            node.meta["nn_module_stack"] = {
                call.label: (call.path, type(traced.model.get_submodule(call.path))) for call in around
            }
    graph.output(tuple(nodes[index] for index in traced.output.refs))
    return GraphModule(attributes, graph)


def _tensor(traced: TracedModel, step: Step) -> Any:
    if step.kind == "constant":
        return step.constant
    path, _, name = step.target.rpartition(".")
    return getattr(traced.model.get_submodule(path), name)
