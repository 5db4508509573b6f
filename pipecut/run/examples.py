"""Checks of the arguments of modules that were cut by hand: by their example inputs, and by their keywords."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, StageMetadataError
from ..pipe_ir import flatten
from ..stage import PipelineStage, open_value, placement_of
from ..text import did_you_mean, listed
from .transport import Meta

_Dims = Iterator[int | None]  # along which the leaves of a call were cut, None for what was not


def check_arrived(stage: PipelineStage, arrived: Sequence[Tensor]) -> None:
    """Raise if what comes from the stage before does not fit `input_args`; the number of samples may differ."""
    if stage.input_args is None:
        return
    expected = [Meta.of(example) for example in stage.input_args]
    got = [Meta.of(value) for value in arrived]
    if [_without(meta, 0) for meta in expected] != [_without(meta, 0) for meta in got]:
        source = stage.stage_index - 1
        raise StageMetadataError(
            f"stage {stage.stage_index} was made for input_args {listed(expected)}, and gets {listed(got)} from "
            f"stage {source}: check what stage {source} returns"
        )


def check_given(
    stage: PipelineStage, args: Sequence[Any], kwargs: Mapping[str, Any], dims: Sequence[int | None]
) -> None:
    """Raise if a microbatch for the first stage does not fit `input_args`; the number of samples may differ.

    `dims` are those along which the leaves were cut, positional arguments first. Tensors in nested values count by
    their order. A keyword counts if it is that of a place for which there is an example.
    """
    if not stage.input_args:
        return
    expected = [Meta.of(leaf) for leaf in flatten(stage.input_args)[0] if isinstance(leaf, Tensor)]
    got = _given(stage, args, kwargs, iter(dims))
    # What is passed by a name that the module does not show, as a wrapper around it may, cannot be compared.
    wanted = expected[: len(got)] if kwargs else expected
    pairs = zip(wanted, got, strict=False)
    if len(wanted) != len(got) or any(_without(meta, dim) != _without(mine, dim) for meta, (mine, dim) in pairs):
        raise InputError(
            f"stage 0 was made for input_args {listed(expected)}, the number of samples aside, and the inputs of "
            f"step() are {listed([meta for meta, _ in got]) or 'no tensors'} in a microbatch: pass inputs like the "
            "example, make the stage with an example of these, or leave out input_args"
        )


def _given(
    stage: PipelineStage, args: Sequence[Any], kwargs: Mapping[str, Any], dims: _Dims
) -> list[tuple[Meta, int | None]]:
    """Return the tensors of a call in the order of the module's parameters, with the dims of their samples."""
    found = [pair for value in args for pair in _tensors(value, dims)]
    by_name = {name: _tensors(value, dims) for name, value in kwargs.items()}
    places = len(stage.input_args or ())
    for name in _parameters_of(stage.submod)[0][len(args) : places]:
        if name not in by_name:
            break
        found += by_name[name]
    return found


def _tensors(value: Any, dims: _Dims) -> list[tuple[Meta, int | None]]:
    leaves, _ = open_value(value)
    return [(Meta.of(leaf), dim) for leaf, dim in zip(leaves, dims, strict=False) if isinstance(leaf, Tensor)]


def _without(meta: Meta, dim: int | None) -> tuple[Any, ...]:
    """Return what has to be the same: dtype, placement, and all sizes but the number of samples."""
    shape, placing = meta.whole_shape, placement_of(meta.on_mesh)
    if dim is None:
        return shape, meta.dtype, placing
    return (*shape[:dim], *shape[dim + 1 :]), len(shape), meta.dtype, placing


# Keyword arguments.

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def taken_by(module: nn.Module, places: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a module takes besides its first positional arguments.

    >>> class Part(nn.Module):
    ...     def forward(self, x, labels=None): ...
    >>> taken_by(Part(), 1, {"x": 1, "labels": 2, "mask": 3})
    {'labels': 2}
    """
    names, any_name = _parameters_of(module)
    given = set(names[:places])
    return {name: value for name, value in kwargs.items() if name not in given and (any_name or name in names)}


def check_known_kwargs(stages: Iterable[PipelineStage], kwargs: Mapping[str, Any]) -> None:
    """Raise on a keyword that no module of this process takes."""
    known: list[str] = []
    for stage in stages:
        names, any_name = _parameters_of(stage.submod)
        if any_name:
            return
        known += names
    for name in kwargs:
        if name not in known:
            raise InputError(
                f"step() got the keyword {name!r}, which the forward of no stage in this process takes (they take "
                f"{', '.join(dict.fromkeys(known)) or 'none'}).{did_you_mean(name, known)}"
            )


def _parameters_of(module: nn.Module) -> tuple[list[str], bool]:
    """Return the names of a forward's parameters, positional ones first, and True if it takes any others."""
    parameters = inspect.signature(module.forward).parameters.values()
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return [each.name for each in parameters if each.kind in _BY_NAME], any_name
