"""Split the backward of a large stage: input gradients now, and later the weight gradients that cost most of the rest.

The autograd graph of a microbatch is walked from the outputs, and cut at the edges from an operation to its weights.
All that lies behind a cut, from a transposed weight to the accumulator, runs when the weight gradients are computed. So
nothing but cuts may lead there, or it would run twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ...torch_internals import NodeKind, tensor_hooks
from .autograd import Gradients, InputLeaves, PendingGradient, PendingWeights, Root, Roots, accumulate, collect
from .nodes import DEFERRABLE_NODES, DeferrableNode, Deferred

# A weight that takes more operations to make than this (casts, parametrizations) is treated like an activation.
_LARGEST_WEIGHT_GRAPH = 16


class _Cut(NamedTuple):
    """A node whose weight gradients are deferred, and the part of the graph behind the edges that they go along."""

    node: Node
    deferred: Deferred
    first_behind: list[Node]
    behind: set[Node]


class Graph:
    """The part of an autograd graph that runs at once: its leaves, and the cuts that bound it.

    Every edge is followed but those that are cut. If another path turns out to lead behind a cut, the cut is undone.
    """

    def __init__(self, roots: Iterable[Node], inputs: Iterable[Tensor], min_work: float) -> None:
        self.cuts: list[_Cut] = []
        self.parameters: list[Tensor] = []
        self.reaches_inputs = False
        self.has_reentrant_checkpoint = False
        self._inputs = {id(value) for value in inputs}
        self._min_work = min_work
        self._nodes: set[Node] = set()
        self._walk(list(roots))
        while conflicts := [cut for cut in self.cuts if not self._nodes.isdisjoint(cut.behind)]:
            self.cuts = [cut for cut in self.cuts if self._nodes.isdisjoint(cut.behind)]
            for cut in conflicts:
                cut.deferred.unhook()
                self._walk(cut.first_behind)

    def discard(self) -> None:
        """Undo all cuts, and with them the hooks on the nodes."""
        for cut in self.cuts:
            cut.deferred.unhook()
        self.cuts = []

    def _walk(self, stack: list[Node]) -> None:
        nodes = self._nodes
        while stack:
            node = stack.pop()
            if node in nodes:
                continue
            nodes.add(node)
            kind = type(node).__name__
            if kind == NodeKind.ACCUMULATOR:
                self._meet_leaf(node)
                continue
            following = [target for target, _ in node.next_functions if target is not None]
            deferrable = DEFERRABLE_NODES.get(kind)
            cut = None if deferrable is None else self._find_cut(node, deferrable)
            if cut is not None:
                self.cuts.append(cut)
                for target in cut.first_behind:
                    following.remove(target)
            elif kind == NodeKind.REENTRANT_CHECKPOINT:
                # It runs a backward of its own inside, and raises in a backward for chosen tensors only.
                self.has_reentrant_checkpoint = True
            stack += following

    def _meet_leaf(self, node: Any) -> None:
        leaf = node.variable
        if id(leaf) in self._inputs:
            self.reaches_inputs = True
        else:
            self.parameters.append(leaf)

    def _find_cut(self, node: Node, deferrable: DeferrableNode) -> _Cut | None:
        edges = node.next_functions
        for numbers in deferrable.weight_edges:
            targets = [(target, edge) for target, edge in (edges[number] for number in numbers) if target is not None]
            if len(targets) < len(numbers):
                continue
            recipe = deferrable.recipe(node, numbers)
            behind = self._weight_graph([target for target, _ in targets]) if recipe.work >= self._min_work else None
            deferred = None if behind is None else Deferred.of(node, recipe, targets)
            if behind is not None and deferred is not None:
                return _Cut(node, deferred, [target for target, _ in targets], behind)
        return None

    def _weight_graph(self, nodes: list[Node]) -> set[Node] | None:
        """Return all nodes that these lead to; None if they are many, or an input is among them."""
        found: set[Node] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            if type(node).__name__ == NodeKind.ACCUMULATOR:
                if id(node.variable) in self._inputs:  # type: ignore[attr-defined]
                    return None
            elif len(found) > _LARGEST_WEIGHT_GRAPH:
                return None
            stack += [target for target, _ in node.next_functions if target is not None]
        return found


def _shared_groups(cuts: Iterable[_Cut]) -> list[list[Deferred]]:
    """Group cuts that share nodes behind them: those run once, on the sum of the gradients."""
    group_of: dict[Node, list[_Cut]] = {}
    for cut in cuts:
        group = [cut]
        for others in {id(group_of[node]): group_of[node] for node in cut.behind if node in group_of}.values():
            group += others
        for member in group:
            group_of.update(dict.fromkeys(member.behind, group))
    return [[cut.deferred for cut in group] for group in {id(group): group for group in group_of.values()}.values()]


# Small gradients are passed to autograd's engine together, up to this size, for each call takes time. Large ones go at
# once, which frees their memory for the next one.
_BYTES_AT_ONCE = 2**20


def defer_weights(
    roots: Roots, inputs: Sequence[Any], leaves: InputLeaves, graph: Graph
) -> tuple[Gradients, PendingWeights]:
    """Compute the gradients of the inputs now, and of the parameters before a cut, which are held back."""
    edges = [GradientEdge(cut.node, 0) for cut in graph.cuts]
    wanted: list[Root] = [*leaves.values(), *graph.parameters, *edges]
    try:
        with _without_hooks(graph.parameters):
            found = collect(roots.outputs, roots.gradients, wanted)
    finally:
        for cut in graph.cuts:
            cut.deferred.unhook()
    for cut in reversed(graph.cuts):
        cut.deferred.set_if_missing(found.pop())
    received = _like_accumulated(leaves, found, roots.gradients)
    gradients = tuple(received.get(index) for index in range(len(inputs)))
    entries: list[Root] = []
    held: list[Tensor | None] = []
    for parameter, gradient in zip(graph.parameters, found[len(leaves) :], strict=True):
        if gradient is not None:
            entries.append(parameter)
            held.append(gradient)
    groups = _shared_groups(graph.cuts)
    finish = functools.partial(_finish, entries, held, groups)
    return gradients, PendingWeights(finish, functools.partial(_pending, held, groups))


class _Held:
    """A gradient of a parameter that is computed already, at its place in a list."""

    def __init__(self, gradients: list[Tensor | None], place: int) -> None:
        self._gradients = gradients
        self._place = place

    @property
    def gradient(self) -> Tensor | None:
        return self._gradients[self._place]

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        self._gradients[self._place] = gradient


def _pending(held: list[Tensor | None], groups: list[list[Deferred]]) -> list[PendingGradient]:
    return [*(deferred for group in groups for deferred in group), *(_Held(held, at) for at in range(len(held)))]


def _like_accumulated(
    leaves: InputLeaves, found: Iterable[Tensor | None], taken: Iterable[Tensor]
) -> dict[int, Tensor]:
    """Return gradients as autograd leaves them in `.grad`: laid out like the input, none the same tensor as another."""
    seen = set(map(id, taken))
    own = {}
    for (index, leaf), gradient in zip(leaves.items(), found, strict=False):
        if gradient is None:
            continue
        if gradient.layout is torch.strided and (id(gradient) in seen or gradient.stride() != leaf.stride()):
            gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
        seen.add(id(gradient))
        own[index] = gradient
    return own


@contextlib.contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Remove the hooks on these tensors for a while: they are called when the gradient is added to `.grad`."""
    hooked = [hooks for hooks in (tensor_hooks(parameter) for parameter in parameters) if hooks]
    kept = [dict(hooks) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(hooked, kept, strict=True):
            since = dict(hooks)
            hooks.clear()
            hooks.update(before | since)


def _finish(entries: list[Root], held: list[Tensor | None], groups: list[list[Deferred]]) -> None:
    """Compute the deferred gradients, and let autograd add them and those held back to `.grad`, hooks and all.

    Autograd must sum what a group of gradients has in common before it calls a hook: it gets each group at once.
    """
    size = 0
    gradients = [gradient for gradient in held if gradient is not None]
    if len(gradients) < len(held):
        entries = [entry for entry, gradient in zip(entries, held, strict=True) if gradient is not None]
    held.clear()
    while groups:
        for deferred in groups.pop():
            for entry, gradient in deferred.compute():
                entries.append(entry)
                gradients.append(gradient)
                size += gradient.nbytes
                del gradient
        if size >= _BYTES_AT_ONCE:
            _pass_on(entries, gradients)
            size = 0
    _pass_on(entries, gradients)


def _pass_on(entries: list[Root], gradients: list[Tensor]) -> None:
    if entries:
        accumulate(entries, gradients)
    entries.clear()
    gradients.clear()
