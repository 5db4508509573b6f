"""Records of a trace while it runs: tensors, graph nodes, open calls, attributes of modules, lines of code."""

from __future__ import annotations

import copy
import linecache
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
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
    memory: int | None = None  # of a copy: the memory that it would be in

    @classmethod
    def of(cls, node: Node) -> RecordedNode:
        value, stack_trace = node.meta.get("val"), node.meta.get("stack_trace") or ""
        memory = node.meta.get("memory")
        return cls(node, node.op, node.target, node.args, dict(node.kwargs), value, stack_trace, memory)


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


# Lines of the user's code for messages: the one that runs, that made a node, or that raised an error.


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = str(Path(torch.__file__).parent / "nn" / "modules")
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_START = (str(Path(__file__).parent / "run.py"), "_export")  # calls torch.export: no user's code of the trace beyond it


def user_line() -> str:
    """Return the innermost line outside of torch and this package; in a model of torch's layers, that of the layer."""
    frame: FrameType | None = sys._getframe(1)
    layer = ""
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _START:
        filename = frame.f_code.co_filename
        if is_users_code(filename):
            return _text(frame)
        if not layer and filename.startswith(_LAYERS) and not filename.endswith("module.py"):
            layer = _text(frame)
        frame = frame.f_back
    return layer


def is_users_code(filename: str) -> bool:
    """Return True for a file that is neither torch's nor of this package."""
    return not filename.startswith((_TORCH, _PACKAGE, "<"))


def line_of(stack_trace: str) -> str:
    """Return the user's line from the last frame of a stack trace that is a text."""
    lines = stack_trace.strip().splitlines()
    frames = [(place.strip(), code.strip()) for place, code in zip(lines, lines[1:], strict=False) if "File " in place]
    own = [f"{place}: {code}" for place, code in frames if _PACKAGE not in place]
    return own[-1] if own else ""


def _text(frame: FrameType) -> str:
    filename = frame.f_code.co_filename
    code = linecache.getline(filename, frame.f_lineno).strip()
    return f"{filename}:{frame.f_lineno}, in {frame.f_code.co_name}" + (f": {code}" if code else "")


class UntraceableError(Exception):
    """Raised where a forward does what no trace can hold, though torch.export may not notice; `place` is its line."""

    def __init__(self, reason: str, remedy: str, place: str) -> None:
        super().__init__(reason)
        self.remedy, self.place = remedy, place


# Errors of which torch prints a page, about the tracer.
_PLAIN_WORDS = {
    "GuardOnDataDependentSymNode": "it decides by the values of tensors",
    "DataDependentOutputException": "it needs the values of tensors",
    "DynamicOutputShapeException": "it makes tensors whose sizes depend on the data",
}


def place_of(error: BaseException) -> str:
    """Return the user's line that raised an error: file, line, function and code; empty if there is none."""
    if isinstance(error, UntraceableError):
        return error.place
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    if not frames:
        return ""
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}"


def reason_of(error: BaseException) -> str:
    """Return the message of an error in one line."""
    plain = next((_PLAIN_WORDS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _PLAIN_WORDS), None)
    if plain is not None:
        return plain
    text = str(error).strip().split("\n")[0].strip()
    if isinstance(error, UntraceableError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def why_and_where(error: BaseException) -> str:
    """Return reason and place of an error in one line."""
    place = place_of(error)
    return f"{reason_of(error)}, at {place}" if place else reason_of(error)


def _is_machinery(filename: str) -> bool:
    path = str(Path(filename).absolute())
    return path.startswith((_TORCH, _PACKAGE)) or not Path(filename).exists()
