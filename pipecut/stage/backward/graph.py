"""The autograd graph of one microbatch, walked from the outputs to find weight gradients that can be put off.

A cut goes through the edges from an operation to its weights. What lies behind it, from a transposed weight to the
accumulator, runs when the weight gradients are computed. So nothing but cuts may lead there, or it would run twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from .deferred import Deferred
from .weight_gradients import OPERATIONS, Operation

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


def groups_of(cuts: Iterable[Cut]) -> list[list[Deferred]]:
    """Cuts that share something behind them belong together: what they share runs once, on the sum."""
    group_of: dict[Node, list[Cut]] = {}
    for cut in cuts:
        group = [cut]
        for others in {id(group_of[node]): group_of[node] for node in cut.behind if node in group_of}.values():
            group += others
        for member in group:
            group_of.update(dict.fromkeys(member.behind, group))
    return [[cut.deferred for cut in group] for group in {id(group): group for group in group_of.values()}.values()]
