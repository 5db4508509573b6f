"""One step's data on one rank: microbatches, targets, losses, results."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..stage import PipelineStage
from ..text import did_you_mean


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
    in_order: bool = True  # False if the microbatches do not hold consecutive samples
    seed: int = 0  # of the random numbers
    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
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


# MERGED: Keyword arguments of modules that were cut by hand: each gets those that it takes.


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def taken_by(module: nn.Module, places: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a module takes besides its first positional arguments.

    >>> class Part(nn.Module):
    ...     def forward(self, x, labels=None): ...
    >>> taken_by(Part(), 1, {"x": 1, "labels": 2, "mask": 3})
    {'labels': 2}
    """
    names, any_name = parameters_of(module)
    given = set(names[:places])
    return {name: value for name, value in kwargs.items() if name not in given and (any_name or name in names)}


def refuse_unknown(stages: Iterable[PipelineStage], kwargs: Mapping[str, Any]) -> None:
    """A keyword that no module of this process takes is a mistake."""
    known: list[str] = []
    for stage in stages:
        names, any_name = parameters_of(stage.submod)
        if any_name:
            return
        known += names
    for name in kwargs:
        if name not in known:
            raise InputError(
                f"step() got the keyword {name!r}, which the forward of no stage in this process takes (they take "
                f"{', '.join(dict.fromkeys(known)) or 'none'}).{did_you_mean(name, known)}"
            )


def parameters_of(module: nn.Module) -> tuple[list[str], bool]:
    """The names of a forward's parameters, the positional ones first; and whether it takes any others."""
    parameters = inspect.signature(module.forward).parameters.values()
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return [each.name for each in parameters if each.kind in _BY_NAME], any_name
