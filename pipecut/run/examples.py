"""Checks of arguments: by the example inputs of modules that were cut by hand, and by the keywords that are known."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, KeywordError, StageMetadataError
from ..pipe_ir import TracedCall, flatten
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


# Keywords of schedules and of their calls: those that a module takes, and the nearest name where nobody does.

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OF_STEPS = ("target", "losses", "return_outputs", "loss_kwargs")  # keywords of step() and eval() themselves
_MISSPELT = 0.8  # how near a name is to another that it was meant to be, if it could be a name of its own


def check_options(cls: type, given: Iterable[str]) -> None:
    """Raise on keywords that a schedule does not take; it takes those of its base classes where it has `**options`."""
    known: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        names, any_name = _names_of(inspect.signature(vars(base)["__init__"]))
        known += [name for name in names if name != "self"]
        if not any_name:
            break
    for name in given:
        if name not in known:
            raise KeywordError(
                f"{cls.__name__} got the keyword {name!r}, which it does not take (it takes "
                f"{', '.join(dict.fromkeys(known))}).{did_you_mean(name, known)}"
            )


def check_traced_keywords(call: TracedCall, given: Iterable[str]) -> None:
    """Raise on keywords that a traced model does not take.

    One that takes any, by `**options`, hides misspelt names: those that are new, and near to a name that is known.
    """
    names, any_name = _names_of(call.signature)
    options = _names_of_options(call)
    for name in given:
        if name in names or name in options:
            continue
        near = did_you_mean(name, [*names, *_OF_STEPS], _MISSPELT if any_name else 0.6)
        if near or not any_name:
            raise KeywordError(
                f"step() got the keyword {name!r}, which neither step() nor the forward of {call.model_name} takes "
                f"(they take {', '.join((*_OF_STEPS, *names))}).{near}"
            )


def _names_of_options(call: TracedCall) -> set[str]:
    """Return the keywords that the example passed to the `**options` of the model."""
    parameters = call.signature.parameters.values()
    collects = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), None)
    begins = f"{collects}['"
    return {entry.path[len(begins) :].partition("'")[0] for entry in call.inputs if entry.path.startswith(begins)}


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
                f"{', '.join(dict.fromkeys(known)) or 'none'}).{did_you_mean(name, (*known, *_OF_STEPS))}"
            )


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


def _parameters_of(module: nn.Module) -> tuple[list[str], bool]:
    """Return the names of a forward's parameters, positional ones first, and True if it takes any others."""
    return _names_of(inspect.signature(module.forward))


def _names_of(signature: inspect.Signature) -> tuple[list[str], bool]:
    parameters = signature.parameters.values()
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return [each.name for each in parameters if each.kind in _BY_NAME], any_name
