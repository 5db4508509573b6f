"""torch.distributed.pipelining._backward over pipecut's backward of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..stage.backward import PendingWeights, full_backward, input_backward, weight_backward
from .replaced import replaced

Gradients = tuple["Tensor | None", ...]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> Gradients:
    """The gradients of the inputs; those of the parameters are added to their `.grad`."""
    outputs, grads = _paired(stage_output, output_grads, outputs_with_grads_idxs)
    return full_backward(outputs, grads, input_values)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Tensor],
) -> tuple[Gradients, list[dict[str, Any]]]:
    """The gradients of the inputs, also in their `.grad`, and what `stage_backward_weight` takes."""
    parameters = [weight for weight in weights if weight.requires_grad]
    outputs, grads = _paired(stage_outputs_or_loss, output_grads, None)
    gradients, pending = input_backward(outputs, grads, input_values, parameters)
    for value, gradient in zip(input_values, gradients, strict=True):
        if isinstance(value, Tensor) and gradient is not None:
            value.grad = gradient
    return gradients, groups_of(pending, parameters)


def stage_backward_weight(
    weights: Iterable[Tensor], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> Gradients:
    """Add the gradients that were left to the parameters' `.grad`; returns a None for each, as the peer does."""
    for group in param_groups:
        finish(group)
    return tuple(None for _ in weights)


def _paired(outputs: Any, grads: Any, chosen: list[int] | None) -> tuple[list[Tensor], list[Tensor | None]]:
    values = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    given = [None] * len(values) if grads is None else list(grads) if isinstance(grads, tuple | list) else [grads]
    places = range(len(values)) if chosen is None else chosen
    pairs = [(values[place], given[place]) for place in places if isinstance(values[place], Tensor)]
    return [value for value, _ in pairs], [grad for _, grad in pairs]


def groups_of(pending: PendingWeights, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What waits, in the peer's words: one group for each thing that waits, its "grads" open to be overwritten."""
    waiting = pending.waiting()
    groups: list[dict[str, Any]] = [
        {"params": parameters, "intermediates": [each], "grads": [(each.gradient,)]} for each in waiting
    ]
    if groups:
        groups[-1]["pending"] = pending
    else:
        groups.append({"params": parameters, "intermediates": [], "grads": [], "pending": pending})
    return groups


def finish(group: dict[str, Any]) -> None:
    """Do what waits, with the gradients that the group has now."""
    for each, grads in zip(group.pop("intermediates"), _summed(group.pop("grads")), strict=False):
        each.gradient = grads
    pending: PendingWeights | None = group.pop("pending", None)
    if pending is not None:
        weight_backward(pending)


def _summed(grads: Iterable[Any]) -> Iterable[Tensor | None]:
    for entry in grads:
        there = [each for each in (entry if isinstance(entry, tuple | list) else (entry,)) if each is not None]
        yield sum(there[1:], there[0]) if there else None


_SEARCH = "the graph of a stage is searched by pipecut.stage.backward.input_backward()"
construct_reverse_graph = replaced("construct_reverse_graph", _SEARCH)
get_param_groups = replaced("get_param_groups", _SEARCH)
reverse_closure = replaced("reverse_closure", _SEARCH)
