"""Values that describe a cut model: its edges, its stages, its tied parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import sympy

from .spec import TensorSpec
from .traced import TracedCall


@dataclass(frozen=True)
class Edge:
    """A value that one stage makes and another uses.

    An "activation" goes from the stage that made it to one that uses it, however far. A "root input" is a model input
    that a later stage uses; it comes from the first stage, where the data is.
    """

    value: int
    name: str
    kind: Literal["activation", "root input"]
    source: int
    target: int
    spec: TensorSpec

    def __str__(self) -> str:
        return f"{self.name}: {self.source} -> {self.target} {self.spec}"


@dataclass(frozen=True)
class RecomputedValue:
    """A value that a stage makes again, since that costs less than receiving it from the stage that made it."""

    value: int
    name: str
    source: int
    stage: int
    spec: TensorSpec


@dataclass(frozen=True)
class TiedParameter:
    """One parameter held by several stages; its gradient is the sum over all of them."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    owner: int


@dataclass(frozen=True)
class StageInfo:
    """Inputs and outputs of a stage, in the order of its forward's arguments and results."""

    index: int
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    outputs: tuple[int, ...]
    output_names: tuple[str, ...]
    modules: tuple[str, ...]
    flops: sympy.Expr
    code: Mapping[str, str]


@dataclass(frozen=True)
class PipeInfo:
    """Description of a Pipe without its modules, small enough to send to other ranks."""

    num_stages: int
    stages: tuple[StageInfo, ...]
    edges: tuple[Edge, ...]
    tied_parameters: tuple[TiedParameter, ...]
    unused_parameters: tuple[str, ...]
    call: TracedCall
