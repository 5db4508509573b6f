"""The end of the model: its result, and the loss at which the backward begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..pipe_ir import flatten, map_leaves, unflatten
from ..stage import Flight, PipelineStage, check_merge_spec, full_tensor, merge_chunks
from .loss import Losses, Objective
from .state import Batch

# MERGED: The outputs of the microbatches, put together to that of the batch.


def _refuse_unmergeable(result: Any, batch: Batch, microbatch: int) -> None:
    """An output that cannot be put together is refused before there are gradients."""
    check_merge_spec(result, batch.merge_spec)
    if batch.merge_spec is None and len(batch.samples) > 1:
        sizes, rows = [batch.samples[microbatch]], _known_rows(batch, [microbatch])
        merge_chunks([result], None, sizes=sizes, rows=rows, in_order=batch.in_order)


def _known_rows(batch: Batch, microbatches: Sequence[int]) -> list[set[int]]:
    """An output with as many rows as the target has rows or elements has some of them for each sample."""
    found = []
    for microbatch in microbatches:
        leaves, _ = flatten(None if batch.targets is None else batch.targets[microbatch])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        found.append({number for tensor in tensors for number in (tensor.shape[0], tensor.numel())})
    return found


def merged(batch: Batch, losses: Losses, *, scaled: bool) -> Any:
    """The output of the batch; the loss in it is that of the batch."""
    results = [batch.results[number] for number in sorted(batch.results)]
    if len(results) == 1 and batch.merge_spec is None:
        return results[0]  # whatever it is
    rows = _known_rows(batch, sorted(batch.results))
    output = merge_chunks(
        results, batch.merge_spec, batch.samples, weights=batch.loss_weights, rows=rows, in_order=batch.in_order
    )
    if scaled or batch.loss_place is None or batch.merge_spec is not None:
        return output
    leaves, structure = flatten(output)
    first = losses.in_order()[0]
    leaves[batch.loss_place] = torch.full_like(first, losses.total(scaled=False))
    return unflatten(structure, leaves)


class Ending:
    """What the last stage does besides its module."""

    def __init__(self, objective: Objective, *, scale_gradients: bool) -> None:
        self.objective = objective
        self.scale_gradients = scale_gradients
        self.in_loss_fn = False

    def reach(self, stage: PipelineStage, microbatch: int, flight: Flight, batch: Batch) -> None:
        """The last stage has run its module."""
        output = stage.select_output(flight.result)
        with torch.set_grad_enabled(batch.training):
            self.in_loss_fn = not self.objective.is_own
            target = None if batch.targets is None else batch.targets[microbatch]
            # A loss of the model's own is found by its name, which only the whole result has.
            loss = self.objective.loss(flight.result if self.objective.is_own else output, target, batch.loss_kwargs)
            self.in_loss_fn = False
        if batch.training or loss is not None:
            self._begin_with(self.objective.checked(loss, flight.result, microbatch), stage, microbatch, flight, batch)
            if self.objective.is_own:
                leaves, _ = flatten(output)
                batch.loss_place = next((place for place, leaf in enumerate(leaves) if leaf is loss), None)
        if batch.keep_results:
            result = _detached(output)
            if not batch.results:
                _refuse_unmergeable(result, batch, microbatch)
            batch.results[microbatch] = result
        if batch.training:
            flight.result = None

    def _begin_with(self, loss: Tensor, stage: PipelineStage, microbatch: int, flight: Flight, batch: Batch) -> None:
        """The backward will begin with this loss."""
        if batch.training and not loss.requires_grad and _needs_gradient(stage, flight):
            maker = "the model" if self.objective.is_own else "loss_fn"
            raise InputError(
                f"the loss needs no gradient, though parameters do: {maker} must not detach the output, nor run under "
                "torch.no_grad()"
            )
        # A copy: a reduced loss may lie in a storage as large as the output.
        batch.losses[microbatch] = full_tensor(loss.detach()).clone()
        # The mean of nothing, which has no weight, is NaN, and so would be nothing times its gradient.
        has_weight = batch.loss_weights[microbatch] > 0 or not self.scale_gradients
        flight.loss = loss if has_weight else batch.losses[microbatch]

    def gradient(self, loss: Tensor, microbatch: int, batch: Batch) -> Tensor:
        """The gradient of a microbatch's loss: how much of the batch's loss it is."""
        return torch.full_like(loss, batch.weight(microbatch) if self.scale_gradients else 1.0)


def _needs_gradient(stage: PipelineStage, flight: Flight) -> bool:
    inputs = any(isinstance(value, Tensor) and value.requires_grad for value in flight.inputs)
    return inputs or bool(stage.weights.parameters)


def _detached(result: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result, holders=True)
