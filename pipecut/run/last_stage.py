"""The last stage after its module has run: the loss at which the backward begins, its scale, and the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import InputError
from ..pipe_ir import as_values, flatten, map_leaves, unflatten
from ..stage import Flight, PipelineStage, check_merge_spec, full_tensor, merge_chunks
from ..torch_internals import is_view
from .inputs import Given
from .loss import BatchLoss, Losses, Objective, Weighing, check_no_nan
from .parameters import HeldTensor
from .state import StepState


class LastStage:
    """Makes the loss of a microbatch from what the last stage returned, and keeps the result if it is asked for."""

    def __init__(self, objective: Objective, *, scale_gradients: bool) -> None:
        self.objective = objective
        self.scale_gradients = scale_gradients
        self._mergeable: tuple[Any, ...] | None = None  # the kind of the last result that was seen to be mergeable

    def finish_forward(self, stage: PipelineStage, microbatch: int, flight: Flight, state: StepState) -> None:
        """Make the loss of a microbatch, and keep its result."""
        output = stage.select_output(flight.result)
        is_own = self.objective.loss_fn is None
        has_unsent = stage.pipe_info is not None and bool(stage.pipe_info.unsent)
        target = None if state.targets is None else state.targets[microbatch]
        with torch.set_grad_enabled(state.training):
            state.in_loss_fn = not is_own
            # A loss of the model's own is found by its name, which only the whole result has.
            read = flight.result if is_own else _with_values(output) if has_unsent else output
            loss = self.objective.loss(read, target, state.loss_kwargs)
            state.in_loss_fn = False
        if loss is None and state.training_undecided:
            state.training = False
        if state.training or loss is not None:
            self._begin_with(self.objective.checked(loss, flight.result, microbatch), stage, microbatch, flight, state)
            if is_own:
                leaves, _ = flatten(output)
                state.loss_place = next((place for place, leaf in enumerate(leaves) if leaf is loss), None)
        if state.keep_results:
            result = output.detach() if type(output) is Tensor else _detached(output)
            if not state.results:
                self._check_mergeable(result, microbatch, state)
            state.results[microbatch], state.has_unsent = result, has_unsent
        if state.training:
            flight.result = None

    def _begin_with(
        self, loss: Tensor, stage: PipelineStage, microbatch: int, flight: Flight, state: StepState
    ) -> None:
        """Let the backward of a microbatch begin with this loss."""
        if state.training and not loss.requires_grad and _needs_gradient(stage, flight):
            maker = "the model" if self.objective.is_own else "loss_fn"
            raise InputError(
                f"the loss needs no gradient, though parameters do: {maker} must not detach the output, nor run under "
                "torch.no_grad()"
            )
        # A copy: a reduced loss may lie in a storage as large as the output. Its graph does without that.
        detached = loss.detach()
        kept = (detached if type(detached) is Tensor else full_tensor(detached)).clone()
        state.losses[microbatch] = kept
        if type(loss) is Tensor and loss.untyped_storage().nbytes() > loss.nbytes and not is_view(loss):
            loss.data = kept
        # The mean of nothing, which has no weight, is NaN, and so would be nothing times its gradient.
        has_weight = not self.scale_gradients or (state.weights or state.samples)[microbatch] > 0
        flight.loss = loss if has_weight else kept

    def gradient(self, loss: Tensor, microbatch: int, state: StepState) -> Tensor:
        """Return the gradient of a microbatch's loss: its part of the loss of the batch."""
        weights = state.weights or state.samples
        part = torch.full_like(loss, weights[microbatch] / sum(weights) if self.scale_gradients else 1.0)
        return part if state.loss_scale is None else (part * state.loss_scale.to(part.device)).to(part.dtype)

    def _check_mergeable(self, result: Any, microbatch: int, state: StepState) -> None:
        """Raise on an output that cannot be merged, before there are gradients; one like the last is not tried."""
        samples = state.samples[microbatch]
        if _has_a_row_per_sample([result], [samples], state):
            return
        leaves, structure = flatten(result)
        rows = _known_rows(state, [microbatch])
        kinds = [leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
        kind = (*structure.paths(), *kinds, samples, len(state.samples), *map(frozenset, rows), state.in_order)
        if kind == self._mergeable:
            return
        check_merge_spec(result, state.merge_spec)
        if state.merge_spec is None and len(state.samples) > 1:
            merge_chunks([result], None, sizes=[samples], rows=rows, in_order=state.in_order)
        self._mergeable = kind


def results(
    last: StepState, given: Given, weighing: Weighing | None, *, scaled: bool, check_loss: bool
) -> tuple[Any, BatchLoss]:
    """Return the output of the batch, and its loss."""
    losses = Losses(last.losses, last.weights or last.samples)
    if given.losses is not None:
        given.losses[:] = losses.in_order()
    if weighing is not None and last.losses:
        weighing.check_no_losses_without(last.weights)
    counted = losses.counted(scaled)
    if check_loss:
        check_no_nan(counted)
    total = losses.total(scaled, counted)
    output = _merged(last, losses, total, scaled=scaled) if given.return_outputs else None
    if last.has_unsent:
        output = _with_values(output)
    return output, BatchLoss(1, total) if last.losses else BatchLoss()


def _merged(state: StepState, losses: Losses, total: float, *, scaled: bool) -> Any:
    """Return the output of the batch; the loss in it is that of the batch."""
    numbers = sorted(state.results)
    results = [state.results[number] for number in numbers]
    if len(results) == 1 and state.merge_spec is None:
        return results[0]  # whatever it is
    if _has_a_row_per_sample(results, state.samples, state):
        return torch.cat(results)
    rows = _known_rows(state, numbers)
    output = merge_chunks(
        results, state.merge_spec, state.samples, weights=losses.weights, rows=rows, in_order=state.in_order
    )
    if scaled or state.loss_place is None or state.merge_spec is not None:
        return output
    leaves, structure = flatten(output)
    first = losses.in_order()[0]
    leaves[state.loss_place] = torch.full_like(first, total)
    return unflatten(structure, leaves)


def _has_a_row_per_sample(results: Sequence[Any], samples: Sequence[int], state: StepState) -> bool:
    """Return True for plain tensors that need nothing but to be joined along dim 0, the most common results."""
    first = results[0]
    if state.merge_spec is not None or not state.in_order or type(first) is not Tensor or not first.dim():
        return False
    kind = (first.shape[1:], first.dtype, first.device)
    for result, count in zip(results, samples, strict=True):
        if type(result) is not Tensor or not result.dim() or result.shape[0] != count:
            return False
        if (result.shape[1:], result.dtype, result.device) != kind:
            return False
    return True


def _known_rows(state: StepState, microbatches: Sequence[int]) -> list[set[int]]:
    """Return the numbers of rows and elements of the targets: an output with as many has some of them per sample."""
    found = []
    for microbatch in microbatches:
        leaves, _ = flatten(None if state.targets is None else state.targets[microbatch])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        found.append({number for tensor in tensors for number in (tensor.shape[0], tensor.numel())})
    return found


def _needs_gradient(stage: PipelineStage, flight: Flight) -> bool:
    inputs = any(isinstance(value, Tensor) and value.requires_grad for value in flight.inputs)
    return inputs or bool(stage.weights.parameters)


def _with_values(result: Any) -> Any:
    """Return a result with values that raise in the places of outputs that were not sent."""
    return map_leaves(as_values, result, holders=True)


def _detached(result: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result, holders=True)


# The factor of the loss in a backward, for gradients in float16.


class _LossScaler(Protocol):
    """Knows the factor; every rank has one, with the same factor."""

    def begin_step(self) -> Tensor:
        """Return the factor of a training step that begins; raise if the step does not fit."""

    def check_unscaled(self, call: str, held: Iterable[HeldTensor]) -> None:
        """Raise if gradients of these parameters were multiplied by the factor and not yet divided by it."""


class HasLossScale:
    """Base class of schedules: the loss scaler of its steps, if there is one. Reported losses are not scaled."""

    loss_scaler: _LossScaler | None = None

    def _scale_losses(self, states: Mapping[int, StepState], *, training: bool) -> Mapping[int, StepState]:
        """Return the states of a step, in which losses are scaled from now on."""
        scale = self.loss_scaler.begin_step() if training and self.loss_scaler is not None else None
        for state in states.values():
            state.loss_scale = scale
        return states
