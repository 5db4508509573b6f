"""Keyword arguments of modules that were cut by hand: each gets those that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...errors import InputError, did_you_mean
from ...stage.stage import PipelineStage

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
