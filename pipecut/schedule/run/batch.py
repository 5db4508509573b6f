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
    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def weight(self, microbatch: int) -> float:
        """The part of the whole batch that a microbatch is."""
        return self.samples[microbatch] / sum(self.samples)
