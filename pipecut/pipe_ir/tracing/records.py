"""Records of a trace while it runs: tensors, graph nodes, open calls, attributes of modules."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import Node

from ..structure import LEAF, Atom
from ..traced import SpanKind, Template

NOTHING = Template(LEAF, (None,))


@dataclass(frozen=True)
class RecordedTensor(Atom):
    """A tensor as the tracer knows it: the graph node that stands for it at that moment."""

    node: Node
    requires_grad: bool


@dataclass(frozen=True)
class RecordedNode:
    """A graph node as it was when the traced run ended; torch.export goes on to rewrite the node itself."""

    node: Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    stack_trace: str

    @classmethod
    def of(cls, node: Node) -> RecordedNode:
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
    assigned_buffers: dict[str, RecordedTensor] = field(default_factory=dict)


Attributes = dict[str, dict[str, Any]]  # the plain attributes of each module, by its path


def attributes_of(model: nn.Module) -> Attributes:
    """Return the plain attributes of all modules, apart from those of nn.Module; containers as they are now."""
    return {path: _attributes(module) for path, module in model.named_modules()}


def changed_attributes(before: Attributes, model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of attributes that were set or changed since, by the path of their module."""
    found = {}
    for path, after in attributes_of(model).items():
        # A forward may put a module in the place of another: all of it is new.
        was = before.get(path, {})
        names = sorted(name for name in after if name not in was or not _is_same(was[name], after[name]))
        if names:
            found[path] = tuple(names)
    return found


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in _MACHINERY}
    return {name: copy.copy(value) if isinstance(value, list | dict | set) else value for name, value in own.items()}


_MACHINERY = frozenset(vars(nn.Module()))


def _is_same(before: Any, after: Any) -> bool:
    """Return True if an attribute is unchanged: the same object, or an equal plain value."""
    if isinstance(before, list | tuple) and type(before) is type(after):
        return len(before) == len(after) and all(map(_is_same, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_is_same(before[key], after[key]) for key in before)
    return before is after or (isinstance(before, _COMPARABLE) and type(before) is type(after) and before == after)


_COMPARABLE = (bool, int, float, str, bytes, set)
