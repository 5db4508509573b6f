"""The end of the model: its result, and the loss at which the backward begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...pipe_ir.structure import flatten, map_leaves
from ...stage.on_mesh import gathered
from ...stage.stage import Flight, PipelineStage
from .batch import Batch
from .objective import Objective
from .results import refuse_unmergeable


class Ending:
    """What the last stage does besides its module."""

    def __init__(self, objective: Objective, *, scale_gradients: bool) -> None:
        self.objective = objective
        self.scale_gradients = scale_gradients
        self.in_loss_fn = False

    def reach(self, stage: PipelineStage, microbatch: int, flight: Flight, batch: Batch) -> None:
        """The last stage has run its module."""
        output = stage.handed_over(flight.result)
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
                refuse_unmergeable(result, batch, microbatch)
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
        batch.losses[microbatch] = gathered(loss.detach()).clone()
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
