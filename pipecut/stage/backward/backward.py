"""Backward pass of one stage in two parts: first for its inputs, and later for its weights.

Splitting it lets a schedule fill idle time with weight gradients, which no other stage waits for, and costs nothing if
each operation still runs once. For a small stage, a walk over its graph costs more than that can gain: its first part
is the full backward, and nothing is left for the second. The graph of a large one is searched for the few operations
whose weight gradients are most of the work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ...errors import InputError
from ...torch_internals import NodeKind, sequence_number, tensor_hooks
from .autograd import (
    Gradients,
    InputLeaves,
    PendingWeights,
    Roots,
    accumulate,
    find_input_leaves,
    find_roots,
    no_work,
    pop_gradients,
)
from .deferral import Graph, Split, defer_weights
from .nodes import Deferred, Recipe, Sink
from .weights import StageWeights, min_work_to_defer

# Patterns that a stage keeps: more shapes than these come from data, and are seen once.
_MOST_PATTERNS = 16


def input_backward(
    outputs: Sequence[Tensor],
    output_grads: Sequence[Tensor | None],
    inputs: Sequence[Any],
    parameters: Iterable[Tensor] | StageWeights,
) -> tuple[Gradients, PendingWeights]:
    """Return the gradients of the inputs, as `full_backward` does, and the work that is left for `weight_backward`.

    With plain parameters, no `.grad` of them changes before `weight_backward`. With `StageWeights`, whose gradients
    nobody waits for, that of a stage which is too small to gain from it is complete already: keeping its gradients
    apart would cost more than the split can save.

    >>> import torch
    >>> layer, value = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2, requires_grad=True)
    >>> gradients, pending = input_backward([layer(value)], [torch.ones(1, 1)], [value], layer.parameters())
    >>> torch.equal(gradients[0], layer.weight), layer.weight.grad
    (True, None)
    >>> weight_backward(pending)
    >>> layer.weight.grad
    tensor([[1., 1.]])
    """
    roots, leaves = find_roots(outputs, output_grads), find_input_leaves(inputs)
    if not roots.outputs:
        return (None,) * len(inputs), PendingWeights(no_work)
    if not leaves:
        return (None,) * len(inputs), _defer_everything(roots)
    # The stage's weights, if nothing but autograd itself takes notice of their gradients.
    silent = parameters if isinstance(parameters, StageWeights) and parameters.has_no_gradient_listeners() else None
    on_cpu = roots.outputs[0].is_cpu
    if silent is not None and not (silent.is_worth_deferring(leaves.values(), on_cpu) and _has_no_hooks(leaves)):
        return _add_at_once(roots, inputs, leaves)
    split = _find_split(roots, list(leaves.values()), silent)
    if split is None:
        return (None,) * len(inputs), _defer_everything(roots)
    if not split.nodes and silent is not None:
        return _add_at_once(roots, inputs, leaves)
    return defer_weights(roots, inputs, leaves, split)


def _find_split(roots: Roots, inputs: Sequence[Tensor], silent: StageWeights | None) -> Split | None:
    """Find where the graph is to be cut; return None if no input has an influence, so that everything can wait."""
    on_cpu = roots.outputs[0].is_cpu
    nodes = [output.grad_fn or get_gradient_edge(output).node for output in roots.outputs]
    shapes = tuple([value.shape for value in inputs])
    known: _Pattern | None = None if silent is None else silent.patterns.get(shapes)
    split = None if known is None or silent is None else known.apply(nodes, inputs, silent)
    if split is not None:
        return split
    graph = Graph(nodes, inputs, min_work_to_defer(on_cpu), silent)
    if graph.has_reentrant_checkpoint or not graph.reaches_inputs:
        graph.discard()
    if not graph.reaches_inputs:
        return None
    if graph.has_reentrant_checkpoint and silent is None:
        raise InputError(
            "a stage with checkpoint(..., use_reentrant=True) cannot be split into input_backward and weight_backward "
            "while somebody may listen to its parameters' gradients (hooks, DistributedDataParallel, fully_shard), for "
            "it adds them all at once. Use use_reentrant=False; or, if nobody listens, pass as parameters "
            "StageWeights(module.parameters()), made before the forward"
        )
    if silent is not None and graph.cuts:
        if len(silent.patterns) >= _MOST_PATTERNS:
            silent.patterns.clear()
        silent.patterns[shapes] = _Pattern(nodes, inputs, graph)
    return graph.split()


def weight_backward(pending: PendingWeights) -> None:
    """Add to each parameter's `.grad` what `full_backward` would have added, and let go of the microbatch."""
    pending.take()()


def _defer_everything(roots: Roots) -> PendingWeights:
    edges = [get_gradient_edge(output) for output in roots.outputs]
    return PendingWeights(functools.partial(accumulate, edges, roots.gradients))


def _has_no_hooks(leaves: InputLeaves) -> bool:
    """Return True if no hook is on the inputs: some, on several tensors at once, work in a full backward only."""
    return not any(tensor_hooks(leaf) for leaf in leaves.values())


def _add_at_once(roots: Roots, inputs: Sequence[Any], leaves: InputLeaves) -> tuple[Gradients, PendingWeights]:
    """Run the full backward, which leaves nothing to do."""
    accumulate(roots.outputs, roots.gradients)
    return pop_gradients(inputs, leaves), PendingWeights(no_work)


# Pattern of a stage's graphs: found in one microbatch, and compared with the graph of each later one. The graphs of a
# stage are alike as long as its forward takes the same way, and to compare takes a part of the time of a search.
# Nothing is taken on trust: kinds of nodes, edges and leaves are all compared, and a graph that differs is searched.


class _Step(NamedTuple):
    """One node: its kind, the places of the nodes that its edges lead to, and what it accumulates for.

    A place is that in the order of the comparison; an edge that leads nowhere has None. A leaf is a parameter, or the
    number of an input.
    """

    kind: type[Node]
    edges: tuple[tuple[int | None, int], ...]
    leaf: Tensor | int | None


class _CutStep(NamedTuple):
    """A cut: the place of its node, the edges that are cut, and the recipe of what goes along them."""

    place: int
    edges: tuple[int, ...]
    recipe: Recipe
    sinks: Sequence[Sink | None]


class _Pattern:
    """A graph that was searched, without its nodes."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor], graph: Graph) -> None:
        self._roots = len(roots)
        self._steps = _steps(roots, inputs)
        place_of = {node: place for place, node in enumerate(_in_order(roots))}
        self._cuts = [_CutStep(place_of[cut.node], cut.edges, cut.recipe, cut.sinks) for cut in graph.cuts]
        self._groups = graph.split().groups
        self._parameters = graph.parameters
        # Sinks past a transposition count on it that nobody has put a hook there.
        self._unhooked = [step.place for step in self._cuts]
        self._unhooked += [
            place
            for step in self._cuts
            for edge, sink in zip(step.edges, step.sinks, strict=True)
            if sink is not None and sink.is_transposed and (place := self._steps[step.place].edges[edge][0]) is not None
        ]

    def apply(self, roots: Sequence[Node], inputs: Sequence[Tensor], silent: StageWeights) -> Split | None:
        """Return where a graph that is like this one is cut; None if it is another, or hooks may be on its nodes."""
        since = silent.unhooked_since()
        nodes = None if since is None else self._match(roots, inputs)
        if since is None or nodes is None or any(sequence_number(nodes[place]) < since for place in self._unhooked):
            return None
        deferred = []
        for place, edges, recipe, sinks in self._cuts:
            following: Any = nodes[place].next_functions
            made = Deferred.of(nodes[place], recipe, [following[edge] for edge in edges], sinks, unhooked=True)
            if made is None:
                return None
            deferred.append(made)
        return Split([nodes[step.place] for step in self._cuts], deferred, self._groups, self._parameters, silent)

    def _match(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> list[Node] | None:
        """Return the nodes of a graph in the order of this pattern; None if it is another."""
        if len(roots) != self._roots:
            return None
        nodes: list[Any] = list(roots)
        for place, (kind, edges, leaf) in enumerate(self._steps):
            node = nodes[place]
            if type(node) is not kind:
                return None
            if leaf is not None:
                if node.variable is not (inputs[leaf] if type(leaf) is int else leaf):  # type: ignore[attr-defined]
                    return None
                continue
            following = node.next_functions
            if len(following) != len(edges):
                return None
            for (target, number), (expected, expected_number) in zip(following, edges, strict=True):
                if number != expected_number:
                    return None
                if expected == len(nodes):
                    nodes.append(target)
                elif target is not (None if expected is None else nodes[expected]):
                    return None
        return nodes if len(set(nodes)) == len(nodes) else None


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of a graph in the order in which a comparison meets them; a root that comes twice, twice."""
    nodes = list(roots)
    seen = set(nodes)
    for node in nodes:  # it grows
        for target, _ in node.next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                nodes.append(target)
    return nodes


def _steps(roots: Sequence[Node], inputs: Sequence[Tensor]) -> list[_Step]:
    nodes = _in_order(roots)
    place_of = {node: place for place, node in enumerate(nodes)}
    number_of = {id(value): number for number, value in enumerate(inputs)}
    steps = []
    for node in nodes:
        leaf: Any = getattr(node, "variable", None) if type(node).__name__ == NodeKind.ACCUMULATOR else None
        edges = tuple((None if target is None else place_of[target], number) for target, number in node.next_functions)
        steps.append(_Step(type(node), edges, number_of.get(id(leaf), leaf)))
    return steps
