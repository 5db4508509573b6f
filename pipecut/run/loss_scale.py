"""The factor by which the loss of a step is multiplied before its backward, for gradients in float16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from .state import StepState


class LossScaler(Protocol):
    """Knows the factor; every rank has one, with the same factor."""

    def begin_step(self) -> Tensor:
        """Return the factor of a training step that begins; raise if the step does not fit."""

    def check_unscaled(self, call: str) -> None:
        """Raise if the gradients have been multiplied by the factor and not yet divided by it."""


class HasLossScale:
    """Base class of schedules: the loss scaler of its steps, if there is one. Reported losses are not scaled."""

    loss_scaler: LossScaler | None = None

    def _scale_losses(self, states: Mapping[int, StepState], *, training: bool) -> Mapping[int, StepState]:
        """Return the states of a step, in which losses are scaled from now on."""
        if training and self.loss_scaler is not None:
            _set_scale(states.values(), self.loss_scaler.begin_step())
        return states


def _set_scale(states: Iterable[StepState], scale: Tensor) -> None:
    for state in states:
        state.loss_scale = scale
