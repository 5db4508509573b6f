"""torch.distributed.pipelining._backward over pipecut's backward of a stage."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import PipeError
from ..stage import PendingWeights, full_backward, input_backward, weight_backward
from ._debug import map_debug_info as map_debug_info
from .imported_names import imported_by
from .unsupported import replaced

Gradients = tuple["Tensor | None", ...]
Pair = tuple[Tensor, "Tensor | None"]
logger = logging.getLogger(__name__)


class UnlikeGradientsError(PipeError, AssertionError):
    """Gradients are not built like the outputs that they belong to; also an AssertionError, as with upstream."""


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> Gradients:
    """Return the gradients of the inputs; those of the parameters are added to their `.grad`."""
    outputs, grads = _paired(stage_output, output_grads, outputs_with_grads_idxs)
    return full_backward(outputs, grads, input_values)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Tensor],
) -> tuple[Gradients, list[dict[str, Any]]]:
    """Return the gradients of the inputs, also set as their `.grad`, and the groups for `stage_backward_weight`."""
    parameters = [weight for weight in weights if weight.requires_grad]
    outputs, grads = _paired(stage_outputs_or_loss, output_grads, None)
    # The backward takes the inputs' `.grad` away, so what was there is kept from before.
    before = [value.grad if isinstance(value, Tensor) and value.is_leaf else None for value in input_values]
    gradients, pending = input_backward(outputs, grads, input_values, parameters)
    for value, earlier, gradient in zip(input_values, before, gradients, strict=True):
        if isinstance(value, Tensor) and gradient is not None:
            value.grad = gradient if earlier is None else earlier + gradient
    return gradients, groups_of(pending, parameters)


def stage_backward_weight(
    weights: Iterable[Tensor], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> Gradients:
    """Add the remaining gradients to the parameters' `.grad`; return the ones before, as upstream does."""
    before = tuple(weight.grad for weight in weights)
    for group in param_groups:
        finish(group)
    return before


def _paired(outputs: Any, grads: Any, chosen: list[int] | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the tensors of a nested output, and the gradient of each; None for all stands for one None each."""
    if not isinstance(outputs, Mapping):
        outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        grads = [None] * len(outputs) if grads is None else grads if isinstance(grads, tuple | list) else [grads]
    elif grads is None:
        grads = dict.fromkeys(outputs)
    if chosen is not None:
        outputs, grads = [outputs[place] for place in chosen], [grads[place] for place in chosen]
    pairs = list(_pairs(outputs, grads, "output"))
    return [value for value, _ in pairs], [grad for _, grad in pairs]


def _pairs(output: Any, grad: Any, place: str) -> Iterator[Pair]:
    if isinstance(output, Tensor):
        if grad is not None and not isinstance(grad, Tensor):
            raise UnlikeGradientsError(f"{place} is a tensor, and its gradient is a {type(grad).__name__}")
        yield output, grad
    elif grad is not None and isinstance(output, Mapping | tuple | list):
        mine: Any = _entries(output)
        its = _entries(grad)
        if its is None or mine.keys() != its.keys():
            raise UnlikeGradientsError(
                f"{place} is {_described(output)}, and its gradient is {_described(grad)}: give one gradient for each "
                "entry, None where there is none"
            )
        for key, value in mine.items():
            yield from _pairs(value, its[key], f"{place}[{key!r}]")


def _entries(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, tuple | list) else None


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, Mapping | tuple | list) else f"a {kind}"


def groups_of(pending: PendingWeights, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return pending gradients as upstream's groups: one for each that is pending, whose "grads" may be overwritten."""
    waiting = pending.pending_gradients()
    groups: list[dict[str, Any]] = [
        {"params": parameters, "intermediates": [each], "grads": [(each.gradient,)]} for each in waiting
    ]
    if groups:
        groups[-1]["pending"] = pending
    else:
        groups.append({"params": parameters, "intermediates": [], "grads": [], "pending": pending})
    return groups


def finish(group: dict[str, Any]) -> None:
    """Compute pending gradients, from those that the group has now."""
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
_get_grad_fn_or_grad_acc = replaced("_get_grad_fn_or_grad_acc", _SEARCH)
_autograd_grad_for_inputs = replaced("_autograd_grad_for_inputs", _SEARCH)
_null_coalesce_accumulate = replaced("_null_coalesce_accumulate", "gradients of one value are summed by autograd")

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
