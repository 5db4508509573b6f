"""What is seen of a trace while it runs: tensors, graph nodes, and calls that are not over yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from .structure import LEAF, Atom
from .traced import SpanKind, Template

NOTHING = Template(LEAF, (None,))


@dataclass(frozen=True)
class SeenTensor(Atom):
    """A tensor as the tracer knows it: the graph node that stands for it at that moment."""

    node: Node
    requires_grad: bool


@dataclass(frozen=True)
class SeenNode:
    """A graph node as it was when the traced run ended; torch.export goes on to rewrite the node itself."""

    node: Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    stack_trace: str

    @classmethod
    def of(cls, node: Node) -> SeenNode:
        value, stack_trace = node.meta.get("val"), node.meta.get("stack_trace") or ""
        return cls(node, node.op, node.target, node.args, dict(node.kwargs), value, stack_trace)


@dataclass
class OpenSpan:
    """A span while the code inside it still runs. Positions are numbers of graph nodes made so far."""

    kind: SpanKind
    path: str
    nth_call: int
    begin: int
    args: Template
    options: dict[str, Any] = field(default_factory=dict)
    end: int = -1
    result: Template = NOTHING
    children: list[OpenSpan] = field(default_factory=list)
    buffers_before: dict[str, Any] = field(default_factory=dict)
    assigned_buffers: dict[str, SeenTensor] = field(default_factory=dict)
