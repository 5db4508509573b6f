"""What the calls of a model's modules took and gave in one run on real tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..dynamic import Place
from ..structure import Atom
from ..traced import Template

CallKey = tuple[str, int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ObservedTensor(Atom):
    """A tensor among the results of a call.

    `argument` is the position of the tensor argument that it shares its memory with, `state` the name of the
    parameter or buffer that it is.
    """

    shape: Shape
    stride: Shape
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    argument: int | None
    state: str | None


@dataclass(frozen=True)
class ObservedCall:
    """One call of a module: shapes and strides of its tensor arguments, its result, and what it wrote to.

    `hidden` says what ties the call to the code around it besides its arguments and results; `marked` whether a
    pipe_split() ran inside.
    """

    argument_shapes: tuple[Shape, ...]
    argument_strides: tuple[Shape, ...]
    result: Template
    written_arguments: tuple[int, ...]
    written_buffers: tuple[str, ...]
    hidden: tuple[str, ...]
    marked: bool


@dataclass(frozen=True)
class ObservedRun:
    """One run of a model: the shapes of its tensor inputs, and all calls by path and number."""

    input_shapes: tuple[Shape, ...]
    calls: Mapping[CallKey, ObservedCall]
    changed: tuple[str, ...] = ()  # attributes that forwards have set


@dataclass(frozen=True)
class Observations:
    """All that was seen of a model: the run on the example, those on other sizes, and which sizes must be the same."""

    on_example: ObservedRun
    on_other_sizes: tuple[ObservedRun, ...]
    same_sizes: tuple[tuple[Place, ...], ...]

    @property
    def runs(self) -> tuple[ObservedRun, ...]:
        return (self.on_example, *self.on_other_sizes)
