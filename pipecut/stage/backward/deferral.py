"""Split the backward of a large stage: input gradients now, and later the weight gradients that cost most of the rest.

The autograd graph of a microbatch is walked from the outputs, and cut at the edges from an operation to its weights.
All that lies behind a cut, from a transposed weight to the accumulator, runs when the weight gradients are computed. So
nothing but cuts may lead there, or it would run twice.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ...torch_internals import NodeKind, sequence_number, tensor_hooks
from .autograd import Gradients, InputLeaves, PendingGradient, PendingWeights, Root, Roots, accumulate, collect
from .nodes import DEFERRABLE_NODES, DeferrableNode, Deferred, Recipe, Sink, add_in_place
from .weights import StageWeights

# A weight that takes more operations to make than this (casts, parametrizations) is treated like an activation.
_LARGEST_WEIGHT_GRAPH = 16


class _Cut(NamedTuple):
    """A node whose weight gradients are deferred, and the part of the graph behind the edges that they go along."""

    node: Node
    edges: tuple[int, ...]
    recipe: Recipe
    sinks: Sequence[Sink | None]
    deferred: Deferred
    first_behind: list[Node]
    behind: set[Node]


class Split(NamedTuple):
    """Places at which a graph is cut: nodes, what is deferred of each and in which groups; parameters not behind them.

    Gradients of silent weights are those that nobody listens to.
    """

    nodes: Sequence[Node]
    deferred: Sequence[Deferred]
    groups: Sequence[Sequence[int]]  # places in `deferred`
    parameters: Sequence[Tensor]
    silent: StageWeights | None


class Graph:
    """The part of an autograd graph that runs at once: its leaves, and the cuts that bound it.

    Every edge is followed but those that are cut. If another path turns out to lead behind a cut, the cut is undone.
    Weights that are `silent` are those whose gradients nobody listens to.
    """

    def __init__(
        self, roots: Iterable[Node], inputs: Iterable[Tensor], min_work: float, silent: StageWeights | None
    ) -> None:
        self.cuts: list[_Cut] = []
        self.parameters: list[Tensor] = []
        self.reaches_inputs = False
        self.has_reentrant_checkpoint = False
        self._inputs = {id(value) for value in inputs}
        self._min_work = min_work
        self.silent = silent
        since = None if silent is None else silent.unhooked_since()
        self._unhooked_since = math.inf if since is None else since
        self._nodes: set[Node] = set()
        self._walk(list(roots))
        while conflicts := [cut for cut in self.cuts if not self._nodes.isdisjoint(cut.behind)]:
            self.cuts = [cut for cut in self.cuts if self._nodes.isdisjoint(cut.behind)]
            for cut in conflicts:
                cut.deferred.unhook()
                self._walk(cut.first_behind)

    def split(self) -> Split:
        """Return where it is cut."""
        nodes, deferred = [cut.node for cut in self.cuts], [cut.deferred for cut in self.cuts]
        return Split(nodes, deferred, self._shared_groups(), self.parameters, self.silent)

    def _shared_groups(self) -> list[list[int]]:
        """Group cuts that share nodes behind them: those run once, on the sum of the gradients."""
        group_of: dict[Node, list[int]] = {}
        for place, cut in enumerate(self.cuts):
            group = [place]
            for others in {id(group_of[node]): group_of[node] for node in cut.behind if node in group_of}.values():
                group += others
            for member in group:
                group_of.update(dict.fromkeys(self.cuts[member].behind, group))
        return list({id(group): group for group in group_of.values()}.values())

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
        for numbers, recipe in deferrable.items():
            targets = [(target, edge) for target, edge in (edges[number] for number in numbers) if target is not None]
            if len(targets) < len(numbers):
                continue
            is_worth_it = recipe.work(node) >= self._min_work
            behind = self._weight_graph([target for target, _ in targets]) if is_worth_it else None
            if behind is None:
                continue
            sinks = [self._sink(target) for target, _ in targets]
            deferred = Deferred.of(node, recipe, targets, sinks, self._is_unhooked(node))
            if deferred is not None:
                return _Cut(node, numbers, recipe, sinks, deferred, [target for target, _ in targets], behind)
        return None

    def _is_unhooked(self, node: Node) -> bool:
        """Return True if no hook can be on a node: it was made after the last hook was put anywhere."""
        return sequence_number(node) >= self._unhooked_since

    def _sink(self, node: Node) -> Sink | None:
        """Return the parameter that a gradient at a node is for, if nothing notices who adds it."""
        is_transposed = type(node).__name__ == NodeKind.TRANSPOSE and self._is_unhooked(node)
        end: Any = node.next_functions[0][0] if is_transposed else node
        if self.silent is None or type(end).__name__ != NodeKind.ACCUMULATOR or end.variable not in self.silent:
            return None
        return Sink(end.variable, is_transposed)

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


# Small gradients are passed to autograd's engine together, up to this size, for each call takes time. Large ones go at
# once, which frees their memory for the next one.
_BYTES_AT_ONCE = 2**20


def defer_weights(
    roots: Roots, inputs: Sequence[Any], leaves: InputLeaves, split: Split
) -> tuple[Gradients, PendingWeights]:
    """Compute the gradients of the inputs now, and of the parameters before a cut, which are held back."""
    edges = [GradientEdge(node, 0) for node in split.nodes]
    wanted: list[Root] = [*leaves.values(), *split.parameters, *edges]
    try:
        with _without_hooks(split.parameters):
            found = collect(roots.outputs, roots.gradients, wanted)
    finally:
        for deferred in split.deferred:
            deferred.unhook()
    for deferred in reversed(split.deferred):
        deferred.set_if_missing(found.pop())
    received = _like_accumulated(leaves, found, roots.gradients)
    gradients = tuple(received.get(index) for index in range(len(inputs)))
    held = found[len(leaves) :]
    groups = [[split.deferred[place] for place in group] for group in split.groups]
    finish = functools.partial(_finish, split.parameters, held, groups, split.silent)
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
    known = [place for place, gradient in enumerate(held) if gradient is not None]
    return [*(deferred for group in groups for deferred in group), *(_Held(held, place) for place in known)]


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


def _finish(
    parameters: Sequence[Tensor], held: list[Tensor | None], groups: list[list[Deferred]], silent: StageWeights | None
) -> None:
    """Compute the deferred gradients, and let autograd add them and those held back to `.grad`, hooks and all.

    Autograd must sum what a group of gradients has in common before it calls a hook: it gets each group at once. What
    it would only add to the `.grad` of a silent parameter is added here, while it is in the caches.
    """
    size = 0
    entries: list[Root] = []
    gradients: list[Tensor] = []
    for parameter, gradient in zip(parameters, held, strict=True):
        is_silent = silent is not None and parameter in silent
        if gradient is None or (is_silent and parameter.grad is not None and add_in_place(parameter.grad, gradient)):
            continue
        entries.append(parameter)
        gradients.append(gradient)
    held.clear()
    gradient = None
    while groups:
        group = groups.pop()
        for deferred in group:
            for entry, gradient in deferred.compute(directly=len(group) == 1):
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
