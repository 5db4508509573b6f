"""Steps of a schedule without a loss_fn: they train if the output of the model holds a loss, and else tell that not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from ...errors import PipeWarning
from ..plan import Plan
from .batch import Batch
from .objective import WAYS, Objective
from .opening import opening_of
from .runner import Runner

LOSS, OWN, GIVEN = "loss", "the model's own", "that of loss_fn"  # what the last stage's rank tells the others


class OpenSteps:
    """Whether the steps of a schedule are open. They are not any more, once one of them has trained."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._has_trained = False

    @property
    def fact(self) -> dict[str, str]:
        """What the rank of the last stage has to tell."""
        return {LOSS: OWN if self._objective.is_own else GIVEN}

    def is_next(self, plan: Plan, told: Mapping[str, str]) -> bool:
        """Whether the next step trains only if there is a loss, by what the ranks have told each other."""
        return told.get(LOSS) == OWN and not self._has_trained and opening_of(plan) is not None

    def run(self, runner: Runner, batches: Mapping[int, Batch], last_rank: int) -> bool:
        """Run such a step, and return whether it trained."""
        for batch in batches.values():
            batch.is_open = True
        if last_rank in batches:
            self._objective.without_loss = batches[last_rank].has_no_loss
        try:
            runner.run(batches)
        finally:
            self._objective.without_loss = None
        self._has_trained = all(batch.training for batch in batches.values())
        if not self._has_trained:
            _warn()
        return self._has_trained


def _warn() -> None:
    """A user who forgot the loss must not believe that he trains."""
    warnings.warn(
        "step() has run forwards only, and no gradients were computed: there is neither a loss_fn nor a target, and "
        f"the output of the model holds no loss (were the labels passed?). To evaluate, call eval(); to train, {WAYS}",
        PipeWarning,
        stacklevel=5,  # the user's call of step()
    )
