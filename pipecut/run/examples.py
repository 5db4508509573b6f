"""What a stage that was cut by hand gets, against the `input_args` that it was made with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import InputError, StageMetadataError
from ..pipe_ir import flatten
from ..stage import PipelineStage, open_value, placement_of
from ..text import listed
from .state import parameters_of
from .transport.base import Meta

_Dims = Iterator[int | None]  # along which the leaves of a call were cut, None for what was not


def check_arrived(stage: PipelineStage, arrived: Sequence[Tensor]) -> None:
    """What comes from the stage before fits; the number of samples may be another."""
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
    """What step() got for the first stage fits, here as one of its microbatches; the number of samples may be another.

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
    """The tensors of a call in the order of the module's places, with the dims of their samples."""
    found = [pair for value in args for pair in _tensors(value, dims)]
    by_name = {name: _tensors(value, dims) for name, value in kwargs.items()}
    places = len(stage.input_args or ())
    for name in parameters_of(stage.submod)[0][len(args) : places]:
        if name not in by_name:
            break
        found += by_name[name]
    return found


def _tensors(value: Any, dims: _Dims) -> list[tuple[Meta, int | None]]:
    leaves, _ = open_value(value)
    return [(Meta.of(leaf), dim) for leaf, dim in zip(leaves, dims, strict=False) if isinstance(leaf, Tensor)]


def _without(meta: Meta, dim: int | None) -> tuple[Any, ...]:
    """What has to be the same: the dtype and all sizes but the number of samples; how a DTensor lies on its mesh."""
    shape, placing = meta.whole_shape, placement_of(meta.on_mesh)
    if dim is None:
        return shape, meta.dtype, placing
    return (*shape[:dim], *shape[dim + 1 :]), len(shape), meta.dtype, placing
