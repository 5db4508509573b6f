"""Events in the history of a run: calls of torch functions and of modules, with all that was passed to them."""

from __future__ import annotations

import linecache
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from ..structure import Atom


@dataclass(frozen=True)
class TensorNumber(Atom):
    """A tensor of a run, by the order in which tensors appeared."""

    number: int


@dataclass(frozen=True)
class SizeExpression(Atom):
    """A number that the tracer computes with: a sympy expression of the sizes of inputs, or of data."""

    expr: Any


@dataclass(frozen=True)
class Line:
    """A line of code, as text only when somebody asks."""

    code: types.CodeType
    number: int


@dataclass(frozen=True)
class Called:
    """A torch function, with the tensors that it made and wrote to. `modes` are those that change what it does.

    `passed_on` has those results that are arguments: the tracer may return another tensor in their place, or not.
    """

    function: Any
    args: Any
    made: tuple[int, ...]
    written: tuple[int, ...]
    storages: tuple[tuple[int, int], ...]  # of arguments and results: number of the tensor, of its memory
    modes: tuple[Any, ...]
    line: Line | None
    passed_on: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Entered:
    """The begin of a module's call."""

    path: str
    nth_call: int
    args: Any
    line: Line | None


@dataclass(frozen=True)
class Left:
    """The end of a module's call.

    `handed_on` has the tensors that the caller gets for those of `result`, `buffers` those that were assigned anew.
    """

    result: Any
    handed_on: tuple[tuple[int, int], ...]
    buffers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Effect:
    """Something that the forward of a module did, and that no operation shows."""

    path: str
    what: str


Event: TypeAlias = Called | Entered | Left


@dataclass(frozen=True)
class History:
    """One run. `inputs` are its tensor inputs, `sizes` their shapes, `state` parameters and buffers by name.

    `constants` are tensors from elsewhere. `symbols` are the tracer's for the sizes of inputs, by input and dim.
    """

    events: tuple[Event, ...]
    inputs: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    symbols: Mapping[Any, tuple[int, int]]
    state: Mapping[str, int]
    constants: Mapping[int, Tensor]
    effects: tuple[Effect, ...] = ()


def line_text(line: Line) -> str:
    """Return a line of code as messages have it: file, line, function and code."""
    filename = line.code.co_filename
    code = linecache.getline(filename, line.number).strip()
    return f"{filename}:{line.number}, in {line.code.co_name}" + (f": {code}" if code else "")
