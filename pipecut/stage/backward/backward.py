"""Backward pass of one stage in two parts: first for its inputs, and later for its weights.

Splitting it lets a schedule fill idle time with weight gradients, which no other stage waits for, and costs nothing if
each operation still runs once. For a small stage, a walk over its graph costs more than that can gain: all gradients
are computed at once, and those of the parameters held back. The graph of a large one is searched for the few operations
whose weight gradients are most of the work.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...errors import InputError
from ...torch_internals import add_each_, tensor_hooks
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
from .deferral import Graph, defer_weights
from .weights import StageWeights, min_work_to_defer


def input_backward(
    outputs: Sequence[Tensor],
    output_grads: Sequence[Tensor | None],
    inputs: Sequence[Any],
    parameters: Iterable[Tensor] | StageWeights,
) -> tuple[Gradients, PendingWeights]:
    """Return the gradients of the inputs, as `full_backward` does, and the work that is left for `weight_backward`.

    No parameter's `.grad` changes. With `StageWeights` a small stage takes as long as with a full backward; with plain
    parameters longer, for their gradients then go through autograd in any case.

    >>> import torch
    >>> layer, value = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2, requires_grad=True)
    >>> weights = StageWeights(layer.parameters())
    >>> gradients, pending = input_backward([layer(value)], [torch.ones(1, 1)], [value], weights)
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
        return _hold_back_weights(roots, inputs, leaves, silent.parameters)
    nodes = [get_gradient_edge(output).node for output in roots.outputs]
    graph = Graph(nodes, leaves.values(), min_work_to_defer(on_cpu))
    if graph.has_reentrant_checkpoint or not graph.reaches_inputs:
        graph.discard()
    if not graph.reaches_inputs:
        return (None,) * len(inputs), _defer_everything(roots)
    if silent is not None and not graph.cuts:
        return _hold_back_weights(roots, inputs, leaves, silent.parameters)
    if graph.has_reentrant_checkpoint:
        raise InputError(
            "a stage with checkpoint(..., use_reentrant=True) cannot be split into input_backward and weight_backward "
            "while somebody may listen to its parameters' gradients (hooks, DistributedDataParallel, fully_shard), for "
            "it adds them all at once. Use use_reentrant=False; or, if nobody listens, pass as parameters "
            "StageWeights(module.parameters()), made before the forward"
        )
    return defer_weights(roots, inputs, leaves, graph)


def weight_backward(pending: PendingWeights) -> None:
    """Add to each parameter's `.grad` what `full_backward` would have added, and let go of the microbatch."""
    pending.take()()


def _defer_everything(roots: Roots) -> PendingWeights:
    edges = [get_gradient_edge(output) for output in roots.outputs]
    return PendingWeights(functools.partial(accumulate, edges, roots.gradients))


def _has_no_hooks(leaves: InputLeaves) -> bool:
    """Return True if no hook is on the inputs: some, on several tensors at once, work in a full backward only."""
    return not any(tensor_hooks(leaf) for leaf in leaves.values())


def _hold_back_weights(
    roots: Roots, inputs: Sequence[Any], leaves: InputLeaves, parameters: Sequence[Tensor]
) -> tuple[Gradients, PendingWeights]:
    """Run the full backward with the parameters' `.grad` put aside, and put it back afterwards."""
    before = _exchange(parameters, itertools.repeat(None))
    try:
        accumulate(roots.outputs, roots.gradients)
    finally:
        held = _exchange(parameters, before)
    return pop_gradients(inputs, leaves), PendingWeights(functools.partial(_add, parameters, held))


def _exchange(parameters: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Give each parameter another `.grad`, and return the one that it had."""
    found = []
    for parameter, gradient in zip(parameters, gradients, strict=False):
        found.append(parameter.grad)
        parameter.grad = gradient
    return found


def _add(parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
    """Add to `.grad` as autograd does: the first gradient becomes it, later ones are added in place."""
    sums, terms = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        before = parameter.grad
        if before is None:
            parameter.grad = gradient
        elif before.is_sparse or before.requires_grad:
            accumulate((parameter,), (gradient,))
        else:
            sums.append(before)
            terms.append(gradient)
    if sums:
        add_each_(sums, terms)
