"""The backward pass of one stage: in full, or first for its inputs and later for its weights.

Splitting it lets a schedule fill idle time with weight gradients, which nobody waits for, and costs nothing if each
operation still runs once. What a small stage has to gain is not worth a look at its graph. That of a large one is
searched for the few operations whose weight gradients are most of the work.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...errors import InputError
from .engine import (
    Gradients,
    PendingWeights,
    Receivers,
    Starts,
    accumulate,
    find_receivers,
    find_starts,
    nothing,
    take_gradients,
)
from .input_gradients import Graph, defer_weights
from .weights import StageWeights, least_work

# MERGED: The split of a small stage: all gradients at once, those of the parameters held back until they are asked
# MERGED: for.
# MERGED:
# MERGED: Where a weight's gradient takes no longer than to find it in the graph and to put it off, that would gain
# MERGED: nothing.


def _hold_gradients(
    starts: Starts, inputs: Sequence[Any], receivers: Receivers, parameters: Sequence[Tensor]
) -> tuple[Gradients, PendingWeights]:
    """Run the full backward with the parameters' `.grad` put aside; afterwards it is as it was."""
    before = _exchange(parameters, itertools.repeat(None))
    try:
        accumulate(starts.outputs, starts.gradients)
    finally:
        held = _exchange(parameters, before)
    return take_gradients(inputs, receivers), PendingWeights(functools.partial(_add, parameters, held))


def _exchange(parameters: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Give each parameter another `.grad`, and return what it was."""
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
        torch._foreach_add_(sums, terms)


def full_backward(outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None], inputs: Sequence[Any]) -> Gradients:
    """The gradients of the inputs; those of the parameters are added to their `.grad`.

    A loss has the gradient None, which stands for 1. Another output with None does not take part. Inputs are the leaves
    that the stage ran on. One that is no tensor, needs no gradient or has no influence gets None.

    >>> layer, value = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2, requires_grad=True)
    >>> gradients = full_backward([layer(value)], [torch.ones(1, 1)], [value, 7])
    >>> torch.equal(gradients[0], layer.weight), gradients[1], layer.weight.grad
    (True, None, tensor([[1., 1.]]))
    """
    starts, receivers = find_starts(outputs, output_grads), find_receivers(inputs)
    if starts.outputs:
        torch.autograd.backward(starts.outputs, starts.gradients)
    return take_gradients(inputs, receivers)


def input_backward(
    outputs: Sequence[Tensor],
    output_grads: Sequence[Tensor | None],
    inputs: Sequence[Any],
    parameters: Iterable[Tensor] | StageWeights,
) -> tuple[Gradients, PendingWeights]:
    """The gradients of the inputs, as `full_backward` gives them, and what `weight_backward` is to do.

    No parameter's `.grad` changes. With `StageWeights` a small stage takes as long as with a full backward; with plain
    parameters longer, for their gradients then go through autograd in any case.

    >>> layer, value = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2, requires_grad=True)
    >>> weights = StageWeights(layer.parameters())
    >>> gradients, pending = input_backward([layer(value)], [torch.ones(1, 1)], [value], weights)
    >>> torch.equal(gradients[0], layer.weight), layer.weight.grad
    (True, None)
    >>> weight_backward(pending)
    >>> layer.weight.grad
    tensor([[1., 1.]])
    """
    starts, receivers = find_starts(outputs, output_grads), find_receivers(inputs)
    if not starts.outputs:
        return (None,) * len(inputs), PendingWeights(nothing)
    if not receivers:
        return (None,) * len(inputs), _all_later(starts)
    free = parameters if isinstance(parameters, StageWeights) and parameters.are_free() else None
    on_cpu = starts.outputs[0].is_cpu
    if free is not None and not (free.pay_for(receivers.values(), on_cpu) and _may_be_chosen(receivers)):
        return _hold_gradients(starts, inputs, receivers, free.parameters)
    roots = [get_gradient_edge(output).node for output in starts.outputs]
    graph = Graph(roots, receivers.values(), least_work(on_cpu))
    if graph.has_reentrant_checkpoint or not graph.reaches_inputs:
        graph.discard()
    if not graph.reaches_inputs:
        return (None,) * len(inputs), _all_later(starts)
    if free is not None and not graph.cuts:
        return _hold_gradients(starts, inputs, receivers, free.parameters)
    if graph.has_reentrant_checkpoint:
        raise _reentrant_checkpoint()
    return defer_weights(starts, inputs, receivers, graph)


def weight_backward(pending: PendingWeights) -> None:
    """Add to each parameter's `.grad` what `full_backward` would have added, and let go of the microbatch."""
    pending.take()()


def _all_later(starts: Starts) -> PendingWeights:
    edges = [get_gradient_edge(output) for output in starts.outputs]
    return PendingWeights(functools.partial(accumulate, edges, starts.gradients))


def _may_be_chosen(receivers: Receivers) -> bool:
    """Whether no hook is on the inputs: some, on several tensors at once, work in a full backward only."""
    return not any(leaf._backward_hooks for leaf in receivers.values())


def _reentrant_checkpoint() -> InputError:
    return InputError(
        "a stage with checkpoint(..., use_reentrant=True) cannot be split into input_backward and weight_backward "
        "while somebody may listen to its parameters' gradients (hooks, DistributedDataParallel, fully_shard), for "
        "it adds them all at once. Use use_reentrant=False; or, if nobody listens, pass as parameters "
        "StageWeights(module.parameters()), made before the forward"
    )
