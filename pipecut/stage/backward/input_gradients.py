"""The split of a large stage: the input gradients now, and later the weight gradients, which cost most of the rest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .deferred import OPERATIONS, Deferred, Operation
from .engine import Gradients, PendingWeights, Receivers, Starts, Waiting, Way, accumulate, collect

# MERGED: The autograd graph of one microbatch, walked from the outputs to find weight gradients that can be put off.
# MERGED:
# MERGED: A cut goes through the edges from an operation to its weights. What lies behind it, from a transposed
# MERGED: weight to the
# MERGED: accumulator, runs when the weight gradients are computed. So nothing but cuts may lead there, or it would
# MERGED: run twice.


# A weight that takes more operations to make than this (casts, parametrizations) is treated like an activation.
_LARGEST_WEIGHT_GRAPH = 16
_ACCUMULATOR = "AccumulateGrad"
# A reentrant checkpoint runs a backward of its own inside, and refuses to be part of one for chosen tensors only.
_REENTRANT = "CheckpointFunctionBackward"


class Cut(NamedTuple):
    """An operation, its weight gradients that are put off, and what lies behind the edges that they go along."""

    node: Node
    deferred: Deferred
    first_behind: list[Node]
    behind: set[Node]


class Graph:
    """What still runs with the cuts made: the leaves that get a gradient then, and the cuts.

    Every edge is followed but those that are cut. If another way turns out to lead behind a cut, it is taken back.
    """

    def __init__(self, roots: Iterable[Node], inputs: Iterable[Tensor], least_work: float) -> None:
        self.cuts: list[Cut] = []
        self.parameters: list[Tensor] = []
        self.reaches_inputs = False
        self.has_reentrant_checkpoint = False
        self._inputs = {id(value) for value in inputs}
        self._least_work = least_work
        self._nodes: set[Node] = set()
        self._walk(list(roots))
        while conflicts := [cut for cut in self.cuts if not self._nodes.isdisjoint(cut.behind)]:
            self.cuts = [cut for cut in self.cuts if self._nodes.isdisjoint(cut.behind)]
            for cut in conflicts:
                cut.deferred.unhook()
                self._walk(cut.first_behind)

    def discard(self) -> None:
        """Take back all cuts, and with them the hooks on the operations."""
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
            if kind == _ACCUMULATOR:
                self._meet_leaf(node)
                continue
            following = [target for target, _ in node.next_functions if target is not None]
            operation = OPERATIONS.get(kind)
            cut = None if operation is None else self._find_cut(node, operation)
            if cut is not None:
                self.cuts.append(cut)
                for target in cut.first_behind:
                    following.remove(target)
            elif kind == _REENTRANT:
                self.has_reentrant_checkpoint = True
            stack += following

    def _meet_leaf(self, node: Any) -> None:
        leaf = node.variable
        if id(leaf) in self._inputs:
            self.reaches_inputs = True
        else:
            self.parameters.append(leaf)

    def _find_cut(self, node: Node, operation: Operation) -> Cut | None:
        edges = node.next_functions
        for numbers in operation.weight_edges:
            targets = [(target, edge) for target, edge in (edges[number] for number in numbers) if target is not None]
            if len(targets) < len(numbers):
                continue
            recipe = operation.recipe(node, numbers)
            behind = self._weight_graph([target for target, _ in targets]) if recipe.work >= self._least_work else None
            deferred = None if behind is None else Deferred.of(node, recipe, targets)
            if behind is not None and deferred is not None:
                return Cut(node, deferred, [target for target, _ in targets], behind)
        return None

    def _weight_graph(self, nodes: list[Node]) -> set[Node] | None:
        """All that these lead to, if that is little and no input among it."""
        found: set[Node] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            if type(node).__name__ == _ACCUMULATOR:
                if id(node.variable) in self._inputs:  # type: ignore[attr-defined]
                    return None
            elif len(found) > _LARGEST_WEIGHT_GRAPH:
                return None
            stack += [target for target, _ in node.next_functions if target is not None]
        return found


def _groups_of(cuts: Iterable[Cut]) -> list[list[Deferred]]:
    """Cuts that share something behind them belong together: what they share runs once, on the sum."""
    group_of: dict[Node, list[Cut]] = {}
    for cut in cuts:
        group = [cut]
        for others in {id(group_of[node]): group_of[node] for node in cut.behind if node in group_of}.values():
            group += others
        for member in group:
            group_of.update(dict.fromkeys(member.behind, group))
    return [[cut.deferred for cut in group] for group in {id(group): group for group in group_of.values()}.values()]


# Small gradients wait for each other up to this size, for each call of autograd's engine takes time. Large ones go at
# once: what they took is then there for the next one.
_BYTES_AT_ONCE = 2**20


def defer_weights(
    starts: Starts, inputs: Sequence[Any], receivers: Receivers, graph: Graph
) -> tuple[Gradients, PendingWeights]:
    """Compute the gradients of the inputs, and of the parameters that no cut keeps them from; the latter wait."""
    edges = [GradientEdge(cut.node, 0) for cut in graph.cuts]
    wanted: list[Way] = [*receivers.values(), *graph.parameters, *edges]
    try:
        with _silent(graph.parameters):
            found = collect(starts.outputs, starts.gradients, wanted)
    finally:
        for cut in graph.cuts:
            cut.deferred.unhook()
    for cut in reversed(graph.cuts):
        cut.deferred.arrived(found.pop())
    received = _own_gradients(receivers, found, starts.gradients)
    gradients = tuple(received.get(index) for index in range(len(inputs)))
    ways: list[Way] = []
    held: list[Tensor | None] = []
    for parameter, gradient in zip(graph.parameters, found[len(receivers) :], strict=True):
        if gradient is not None:
            ways.append(parameter)
            held.append(gradient)
    groups = _groups_of(graph.cuts)
    finish = functools.partial(_finish, ways, held, groups)
    return gradients, PendingWeights(finish, functools.partial(_waiting, held, groups))


class _Held:
    """A gradient of a parameter that is there already, at its place in a list."""

    def __init__(self, gradients: list[Tensor | None], place: int) -> None:
        self._gradients = gradients
        self._place = place

    @property
    def gradient(self) -> Tensor | None:
        return self._gradients[self._place]

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        self._gradients[self._place] = gradient


def _waiting(held: list[Tensor | None], groups: list[list[Deferred]]) -> list[Waiting]:
    return [*(deferred for group in groups for deferred in group), *(_Held(held, at) for at in range(len(held)))]


def _own_gradients(receivers: Receivers, found: Iterable[Tensor | None], taken: Iterable[Tensor]) -> dict[int, Tensor]:
    """Gradients as they would be in `.grad`: laid out like the input, and not the same tensor as another one."""
    seen = set(map(id, taken))
    own = {}
    for (index, leaf), gradient in zip(receivers.items(), found, strict=False):
        if gradient is None:
            continue
        if gradient.layout is torch.strided and (id(gradient) in seen or gradient.stride() != leaf.stride()):
            gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
        seen.add(id(gradient))
        own[index] = gradient
    return own


@contextlib.contextmanager
def _silent(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Keep hooks on these tensors quiet: they are called when the gradient is added to `.grad`."""
    hooked = [hooks for hooks in (parameter._backward_hooks for parameter in parameters) if hooks]
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


def _finish(ways: list[Way], held: list[Tensor | None], groups: list[list[Deferred]]) -> None:
    """Compute what was put off, and let autograd add it, and the gradients that were held, to `.grad`, hooks and all.

    Autograd must sum what a group of gradients has in common before it calls a hook: it gets each group at once.
    """
    waiting = 0
    gradients = [gradient for gradient in held if gradient is not None]
    if len(gradients) < len(held):
        ways = [way for way, gradient in zip(ways, held, strict=True) if gradient is not None]
    held.clear()
    while groups:
        for deferred in groups.pop():
            for way, gradient in deferred.compute():
                ways.append(way)
                gradients.append(gradient)
                waiting += gradient.nbytes
                del gradient
        if waiting >= _BYTES_AT_ONCE:
            _pass_on(ways, gradients)
            waiting = 0
    _pass_on(ways, gradients)


def _pass_on(ways: list[Way], gradients: list[Tensor]) -> None:
    if ways:
        accumulate(ways, gradients)
    ways.clear()
    gradients.clear()
