"""Events in the history of a run: calls of torch functions and of modules, with all that was passed to them."""

from __future__ import annotations

import linecache
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

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
    is_use: bool = False  # of state that Python has, by which nothing was decided otherwise in any run


@dataclass(frozen=True, eq=False)
class KeptValue:
    """A value that the forward of the module at `path` has changed in an object of Python's.

    `name` is its key or the name of the attribute or variable, if it has one. `holder` has it: a dict, a list, a class,
    the variable of a closure; the attributes of a module are named by its path, so that the model is not kept alive.
    """

    path: str
    holder: Any
    name: Any = None
    of_module: str | None = None
    is_copied: bool = False  # it belongs to a module, and a stage that has a copy of that keeps it in the copy
    used_by: frozenset[str] = frozenset()  # modules that decide by it, if it is a number
    settles: bool = True  # False: it changes in every run, as a cache does not
    is_lost: bool = False  # stages do not keep it where the model does

    def holder_in(self, model: nn.Module) -> Any:
        """Return the object that has the value."""
        return self.holder if self.of_module is None else vars(model.get_submodule(self.of_module))

    def changer(self, model: nn.Module) -> str:
        """Return the name of the module that has changed it."""
        return repr(self.path) if self.path else type(model).__name__

    def who(self, model: nn.Module) -> str:
        """Return which code has changed it, and why stages do not, in words."""
        name = self.changer(model)
        if self.is_copied:
            return f"{name} changes: a stage runs a copy of that module, and changes the copy's"
        return f"{name} changes: it is cut, and the generated code does not do that"


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
