"""One step's data on one rank: microbatches, targets, losses, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Batch:
    """What a rank knows of the step that is running."""

    training: bool
    samples: list[int]  # of each microbatch
    sizes: list[tuple[int, ...]]  # of each microbatch: the symbolic dims, or a number that stands for all shapes
    args: Sequence[Sequence[Any]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    roots: Sequence[Mapping[int, Tensor]] = ()  # traced models: the model's inputs by number, on the first stage's rank
    targets: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keep_results: bool = True
    merge_spec: Any = None  # how the results are put together
    seed: int = 0  # of the random numbers
    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    losses_to_fill: list[Tensor] | None = None  # the caller's, at the end of the step
    weights: Sequence[float] | None = None  # of the microbatches' losses, if it is not the number of samples
    is_open: bool = False  # whether it is still to be seen, from the model's output, if this is training
    loss_place: int | None = None  # the leaf of the results that is the loss, if they hold it

    def has_no_loss(self) -> None:
        """The output of the model has none: this is no training, unless that is settled."""
        if self.is_open:
            self.training = False

    @property
    def loss_weights(self) -> Sequence[float]:
        """How much each microbatch counts in the loss of the batch; known on the rank of the last stage."""
        return self.samples if self.weights is None else self.weights

    def weight(self, microbatch: int) -> float:
        """The part of the loss of the whole batch that a microbatch is."""
        return self.loss_weights[microbatch] / sum(self.loss_weights)
