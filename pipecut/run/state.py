"""The state of one step on one rank: its microbatches, the values in transit, and what the step has made so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..schedule import Action
from .parcels import Contents, Ends
from .transport import Arrival

Key = tuple[int, int, int]  # the stage that gives, the stage that takes, the microbatch


@dataclass
class StepState:
    """Everything that lives for one step on one rank.

    It is made when the step begins and dropped when it ends: executors, their mail and their transport keep nothing
    of a step. Two things are kept elsewhere. A stage has the microbatches in flight, for it can be used without an
    executor. The sums of tied gradients have those from before the step, for the ranks of one process share them.
    """

    training: bool
    samples: list[int]  # of each microbatch
    sizes: list[tuple[int, ...]]  # of each microbatch: the symbolic dims, or a number that stands for all shapes
    seed: int = 0  # of the random numbers
    form: int = 0  # of the call: the trace that it is of
    whole: bool = False  # True: outputs are sent that only the caller reads
    training_undecided: bool = False  # True until the model's output shows whether there is a loss to train with

    # The data of the microbatches.
    args: Sequence[Sequence[Any]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    roots: Sequence[Mapping[int, Tensor]] = ()  # traced models: the model's inputs by number, on the first stage's rank
    targets: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: Tensor | None = None  # the factor of all losses, if they are scaled
    weights: Sequence[float] | None = None  # of the microbatches' losses, if it is not the number of samples

    # The end of the model, on the rank of the last stage.
    keep_results: bool = True
    merge_spec: Any = None  # how the results are merged
    in_order: bool = True  # False if the microbatches do not hold consecutive samples
    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    has_unsent: bool = False  # True if outputs are missing in the results, which were not sent
    loss_place: int | None = None  # the leaf of the results that is the loss, if they hold it

    # Values in transit between stages.
    activations: dict[Key, Arrival] = field(default_factory=dict)
    gradients: dict[Key, Arrival] = field(default_factory=dict)
    outgoing: dict[Key, list[Tensor]] = field(default_factory=dict)
    measured: dict[tuple[Ends, int], Contents] = field(default_factory=dict)  # parcels whose sizes depend on the data
    random_states: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by stage and microbatch
    draws: bool = False  # True if a forward has drawn random numbers, where that has to be known

    # Gradients of the inputs of the model, which they get at the end of the step.
    nested_inputs: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # by stage and microbatch
    input_gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    # The gradients of parameters before the step, each with its version, for a step that fails.
    gradients_before: list[tuple[Tensor, Tensor | None, int]] = field(default_factory=list)

    # The progress of the step.
    backwards_left: dict[int, int] = field(default_factory=dict)  # by stage
    part: Action | None = None  # the part of an overlap that is running
    stage_inputs: list[Any] | None = None  # of the forward that is running
    in_loss_fn: bool = False
