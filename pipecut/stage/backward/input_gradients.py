"""The split of a large stage: the input gradients now, and later the weight gradients, which cost most of the rest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .deferred import Deferred
from .engine import Way, accumulate, collect
from .graph import Graph, groups_of
from .pending import PendingWeights, Waiting
from .starts import Gradients, Receivers, Starts

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
    groups = groups_of(graph.cuts)
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
