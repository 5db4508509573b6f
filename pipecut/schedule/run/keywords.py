"""Keyword arguments of modules that were cut by hand: each gets those that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...errors import InputError, did_you_mean
from ...pipe_ir.structure import map_leaves
from ...stage.stage import PipelineStage

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Taken:
    """The keywords of one call of a module. `leaves` stand for tensors that need a gradient, those of `originals`."""

    kwargs: dict[str, Any]
    originals: list[Tensor]
    leaves: list[Tensor]


def taken_by(module: nn.Module, places: int, kwargs: Mapping[str, Any], *, training: bool) -> Taken:
    """The keywords that a module takes besides its first positional arguments.

    A tensor that needs a gradient is replaced by a leaf: the graph that it comes from may be that of all microbatches,
    which can be gone through once only.

    >>> class Part(nn.Module):
    ...     def forward(self, x, labels=None): ...
    >>> taken_by(Part(), 1, {"x": 1, "labels": 2, "mask": 3}, training=True).kwargs
    {'labels': 2}
    """
    names, any_name = _parameters(module)
    given = set(names[:places])
    mine = {name: value for name, value in kwargs.items() if name not in given and (any_name or name in names)}
    taken = Taken(mine, [], [])

    def leaf(value: Any) -> Any:
        if not training or not isinstance(value, Tensor) or not value.requires_grad:
            return value
        taken.originals.append(value)
        taken.leaves.append(value.detach().requires_grad_())
        return taken.leaves[-1]

    return Taken(map_leaves(leaf, mine), taken.originals, taken.leaves)


def refuse_unknown(stages: Iterable[PipelineStage], kwargs: Mapping[str, Any]) -> None:
    """A keyword that no module of this process takes is a mistake."""
    known: list[str] = []
    for stage in stages:
        names, any_name = _parameters(stage.submod)
        if any_name:
            return
        known += names
    for name in kwargs:
        if name not in known:
            raise InputError(
                f"step() got the keyword {name!r}, which the forward of no stage in this process takes (they take "
                f"{', '.join(dict.fromkeys(known)) or 'none'}).{did_you_mean(name, known)}"
            )


def _parameters(module: nn.Module) -> tuple[list[str], bool]:
    """The names of a forward's parameters, the positional ones first; and whether it takes any others."""
    parameters = inspect.signature(module.forward).parameters.values()
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return [each.name for each in parameters if each.kind in _BY_NAME], any_name
