"""Copies of calls in a trace: the nodes and spans of an earlier call, for a call that was seen to be like it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...torch_internals import ENTER_AUTOCAST, EXIT_AUTOCAST, buffers_of, is_higher_order, storage_id, unproxied
from ..sizes.symbols import SizeDecisions
from ..traced import ModuleRef
from .history import new_buffers
from .numbers import SYMBOLIC, Numbers
from .records import OpenSpan, RecordedTensor
from .repeats import Follower, RecordedCall

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
