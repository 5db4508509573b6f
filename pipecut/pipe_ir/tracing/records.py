"""Records of a trace while it runs: tensors, graph nodes, open calls, attributes of modules, lines of code."""

from __future__ import annotations

import copy
import itertools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...torch_internals import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    buffers_of,
    is_higher_order,
    storage_id,
    torch_functions_off,
    unproxied,
)
from ..structure import LEAF, Atom
from ..traced import ModuleRef, SpanKind, Template
from .events import SYMBOLIC, Numbers, new_buffers
from .repeats import Follower, RecordedCall

if TYPE_CHECKING:
    from ..sizes.symbols import SizeDecisions

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
    like: Node | None = None  # of a copy: the node of the earlier call

    @classmethod
    def of(cls, node: Node) -> RecordedNode:
        value, stack_trace = node.meta.get("val"), node.meta.get("stack_trace") or ""
        memory, like = node.meta.get("memory"), node.meta.get("like")
        return cls(node, node.op, node.target, node.args, dict(node.kwargs), value, stack_trace, memory, like)


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


# Copies of calls: the nodes and spans of an earlier call, for a call that was seen to be like it.


_MEMORIES = itertools.count(-1, -1)  # of tensors that only a copy has


@dataclass(frozen=True)
class TracedCall:
    """A recorded call in a trace: its span, those inside it, its nodes, and the memory that each of these is in.

    Nodes that are sizes are not among them: those of the other call serve both. `places` are the counts of nodes before
    each place in the graph from the begin of the span on. `before` are the nodes of tensors that it was given, `after`
    those that they and the tensors that it has made have in the end: of what a function returns as it is, the tracer
    takes the result of that function from then on. `outside` are the memories that it has not made.
    """

    span: OpenSpan
    inside: tuple[OpenSpan, ...]
    nodes: tuple[Node, ...]
    memories: tuple[int | None, ...]
    places: tuple[int, ...]
    before: dict[int, Node]
    after: dict[int, Node]
    outside: frozenset[int]

    @classmethod
    def of(
        cls, call: RecordedCall, span: OpenSpan, before: dict[int, Node], tracer: Any, numbers: Numbers
    ) -> TracedCall | None:
        """Return the call as it is in a trace, None if it cannot be copied."""
        nodes = tuple(itertools.islice(reversed(tracer.graph.nodes), span.end - span.begin))[::-1]
        if not all(map(_can_be_copied, nodes)):
            return None
        counts = [not isinstance(node.meta.get("val"), SYMBOLIC) for node in nodes]
        places = tuple(itertools.accumulate(counts, initial=0))
        nodes = tuple(itertools.compress(nodes, counts))
        memories = tuple(_memory(node.meta.get("val")) for node in nodes)
        own = (number for number in range(call.numbers, call.end) if call.owns(number) and number in numbers.tensors)
        after = _nodes_of((*before, *own), tracer, numbers)
        outside = {memory for memory in memories if memory is not None and numbers.is_before(memory, call.storages)}
        return cls(span, tuple(_inside(span)), nodes, memories, places, before, after, frozenset(outside))


def nodes_given(call: RecordedCall, tracer: Any, numbers: Numbers) -> dict[int, Node]:
    """Return the nodes of the arguments and the state of a call that begins, by their numbers."""
    return _nodes_of({*map(numbers.of, call.tensors), *call.state.values()}, tracer, numbers)


def _nodes_of(values: Iterable[int], tracer: Any, numbers: Numbers) -> dict[int, Node]:
    slots = ((number, get_proxy_slot(numbers.tensors[number], tracer, None)) for number in values)
    return {number: slot.proxy.node for number, slot in slots if slot is not None}


def _can_be_copied(node: Node) -> bool:
    if node.op != "call_function" or node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST) or is_higher_order(node.target):
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return not any(free_unbacked_symbols(each) for each in values if isinstance(each, (Tensor, *SYMBOLIC)))


def _memory(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    try:
        return storage_id(value)
    except NotImplementedError:
        return None


def _inside(span: OpenSpan) -> Iterator[OpenSpan]:
    for child in span.children:
        yield child
        yield from _inside(child)


class CopiedCall:
    """Copy of an earlier call in a trace, for one whose code runs now; `span` is that of the call."""

    def __init__(
        self, following: Follower, span: OpenSpan, tracer: Any, decisions: SizeDecisions, numbers: Numbers
    ) -> None:
        self._following, self._span, self._tracer = following, span, tracer
        self._decisions, self._numbers = decisions, numbers
        self._call: TracedCall = following.call.of_trace
        self._spans: Iterator[OpenSpan] = iter(self._call.inside)
        self._buffers: list[dict[str, Any]] = []
        self._nodes: dict[Node, Node] = {}

    def enter(self, module: nn.Module) -> OpenSpan:
        """Begin the call of a module inside; return its span in the earlier call, to which decisions belong."""
        self._buffers.append(dict(buffers_of(module)))
        return next(self._spans)

    def leave(self, module: nn.Module) -> dict[str, Tensor]:
        """End the call of a module; return the buffers that it has assigned anew."""
        return new_buffers(module, self._buffers.pop() if self._buffers else self._span.buffers_before)

    def write(self) -> None:
        """Add the nodes of the earlier call to the graph, and its spans to that of the call."""
        if len(self._tracer.graph.nodes) != self._span.begin:
            raise self._following.fail("computes something past the functions of torch")
        with torch_functions_off():
            for number, tensor in self._following.given.items():
                slot, before = get_proxy_slot(tensor, self._tracer, None), self._call.before.get(number)
                if (before is None) is not (slot is None):
                    raise self._following.fail("gets a tensor that the tracer does not know")
                if before is not None and slot is not None:
                    self._nodes[before] = slot.proxy.node
            self._copy_nodes()
        with unproxied():  # the tracer asks for sizes
            for number, tensor in self._following.own.items():
                after = self._call.after.get(number)
                if after is not None and after is not self._call.before.get(number):
                    proxy = Proxy(self._nodes[after], self._tracer)
                    track_tensor(tensor, proxy, constant=None, tracer=self._tracer)
        nth_calls = iter(self._following.nth_calls)
        spans = {id(self._call.span): self._span}
        self._span.children = [self._copy_span(child, nth_calls, spans) for child in self._call.span.children]
        self._decisions.copy(spans)

    def translated(self, paths: Set[str]) -> set[str]:
        """Return the paths of this call's modules for those of the earlier one."""
        return {own for path in paths if (own := self._following.own_path(path)) != path}

    def _copy_nodes(self) -> None:
        graph = self._tracer.graph
        memories = {
            storage_id(self._numbers.tensors[number]): storage_id(tensor)
            for number, tensor in {**self._following.given, **self._following.made}.items()
            if tensor.layout == torch.strided
        }
        for node, memory in zip(self._call.nodes, self._call.memories, strict=True):
            args = self._argument(node.args)
            copy = graph.create_node("call_function", node.target, args, self._argument(node.kwargs), _plain(node.name))
            if memory is not None:
                known = memories.get(memory)
                if known is None:
                    known = memories[memory] = memory if memory in self._call.outside else next(_MEMORIES)
                copy.meta["memory"] = known
            copy.meta["like"] = node
            for name in ("val", "stack_trace"):
                if name in node.meta:
                    copy.meta[name] = node.meta[name]
            self._nodes[node] = copy

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._nodes.get(value, value)
        if isinstance(value, tuple | list):
            return type(value)([self._argument(item) for item in value])
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        return value

    def _copy_span(self, span: OpenSpan, nth_calls: Iterator[int], spans: dict[int, OpenSpan]) -> OpenSpan:
        begin, end = (
            self._span.begin + self._call.places[place - self._call.span.begin] for place in (span.begin, span.end)
        )
        copy = spans[id(span)] = OpenSpan(
            span.kind,
            self._following.own_path(span.path),
            next(nth_calls),
            begin,
            span.args.converted(self._leaf),
            span.options,
            end,
            span.result.converted(self._leaf),
        )
        copy.children = [self._copy_span(child, nth_calls, spans) for child in span.children]
        return copy

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, RecordedTensor):
            return RecordedTensor(self._nodes.get(leaf.node, leaf.node), leaf.requires_grad)
        return ModuleRef(self._following.own_path(leaf.path)) if isinstance(leaf, ModuleRef) else leaf


def _plain(name: str) -> str:
    """Return a name of a node without its number: the graph gives each another."""
    return re.sub(r"_\d+$", "", name)
