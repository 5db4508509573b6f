"""NamedState: the lists, dicts, attributes and variables that the code of a function names.

Python code can share state with any other code. What a function may read or change of it is told by the names in its
code: those of variables, of attributes, and of what is in their reach. Only code of the user's own is followed.
"""

from __future__ import annotations

import collections
import functools
import inspect
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from .structure import is_plain_object

_PLAIN = (bool, int, float, complex, str)
_COLLECTIONS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)


@dataclass(frozen=True)
class _Slot:
    """A place whose values can change: `names` are those of the values in `holder`, if they have some."""

    told: str
    holder: Any
    read: Callable[[], list[Any]]
    names: tuple[str, ...] = ()

    def of(self, name: str) -> str:
        """Return one of its values in words."""
        return f"{name!r} {self.told}" if self.names else self.told


class NamedState:
    """The state that the code of a function names, and of others `also`. With `plain`, only numbers and strings count.

    >>> log: list[float] = []
    >>> state = NamedState(lambda output: output.mean() + sum(log), "loss_fn")
    >>> state.note()
    >>> state.change()
    ''
    >>> log.append(0.5)
    >>> state.change()
    "'log' in pipecut.pipe_ir.named_state"
    """

    def __init__(self, function: object, called: str, *, plain: bool = False, also: Iterable[object] = ()) -> None:
        self._plain = plain
        self.slots: list[_Slot] = []
        seen: dict[tuple[int, frozenset[str]], object] = {}  # other code may name other attributes of an object
        waiting = [_Found(each, called, frozenset()) for each in (function, *also) if each is not None]
        while waiting:
            found = waiting.pop()
            key = id(found.value), frozenset() if isinstance(found.value, types.FunctionType) else found.names
            if key not in seen and not isinstance(found.value, (Tensor, types.ModuleType, *_PLAIN)):
                seen[key] = found.value
                waiting += self._visit(found)
        self._before: list[list[Any]] = []

    def moved(self, copies: Mapping[int, Any]) -> NamedState:
        """Return the state of copies of some modules, by the id of each original's attributes, in place of theirs."""
        moved = NamedState(None, "", plain=self._plain)
        for slot in self.slots:
            part = copies.get(id(slot.holder))
            if part is not None:
                read = functools.partial(_values_of, vars(part), slot.names)
                moved.slots.append(replace(slot, holder=vars(part), read=read))
        return moved

    def slot_of(self, holder: object, name: object) -> _Slot | None:
        """Return the slot with a value of a holder."""
        return next((slot for slot in self.slots if slot.holder is holder and _names(slot, name)), None)

    def note(self) -> None:
        """Note the values as they are."""
        self._before = [slot.read() for slot in self.slots]

    def change(self) -> str:
        """Say what was changed since they were noted, if anything was."""
        for slot, before in zip(self.slots, self._before, strict=True):
            now = slot.read()
            if self._plain:
                now, before = ([each for each in values if isinstance(each, _PLAIN)] for values in (now, before))
                if now == before:
                    continue
            if len(now) != len(before) or any(map(operator.is_not, now, before)):
                names = [name for name, one, other in zip(slot.names, now, before, strict=False) if one is not other]
                return slot.of(names[0]) if names else slot.told
        return ""

    def _visit(self, found: _Found) -> Iterator[_Found]:
        value, told, names = found
        if isinstance(value, types.MethodType):
            code = getattr(value.__func__, "__code__", None)
            yield _Found(value.__func__, told, names)
            yield _Found(value.__self__, told, names | frozenset(() if code is None else _names_in(code)))
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                yield _Found(part, told, names)
        elif isinstance(value, types.FunctionType):
            yield from self._visit_function(value)
        elif type(value) in _COLLECTIONS:
            self._add(told, value, lambda: list(value.values() if isinstance(value, dict) else value))
            for inside in self.slots[-1].read():
                yield _Found(inside, told, names)
        elif isinstance(value, type):
            if is_own_class(value):
                read = functools.partial(_values_of, vars(value), names)
                self._add(f"of the class {value.__qualname__}", value, read, names)
        elif has_attributes(value):
            yield _Found(type(value), told, names)
            yield from self._visit_object(value, told, names)

    def _visit_function(self, function: types.FunctionType) -> Iterator[_Found]:
        if not is_own_code(function.__code__.co_filename):
            return
        names = frozenset(_names_in(function.__code__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            told = f"{name!r} of {function.__qualname__}"
            self._add(told, cell, functools.partial(_contents, cell))
            for value in _contents(cell):
                yield _Found(value, told, names)
        for where, known, used in used_variables(function):
            self._add(f"in {where}", known, functools.partial(_values_of, known, used), used)
            for name in used:
                yield _Found(known.get(name), f"{name!r} in {where}", names)

    def _visit_object(self, value: Any, told: str, names: frozenset[str]) -> Iterator[_Found]:
        functions = _functions_of(value, {"forward", "__call__", *names})
        for function in functions:
            names |= frozenset(_names_in(function.__code__))
            yield _Found(function, told, names)
        for part in value.modules() if isinstance(value, nn.Module) else [value]:
            self._add(f"of {told}", vars(part), functools.partial(_values_of, vars(part), names), names)
            for name in names & vars(part).keys():
                yield _Found(vars(part)[name], f"{name!r} of {told}", names)

    def _add(self, told: str, holder: Any, read: Callable[[], list[Any]], names: Collection[str] = ()) -> None:
        self.slots.append(_Slot(told, holder, read, tuple(names)))


class _Found(NamedTuple):
    """A value that the function leads to, where it was found, and the names that the code around it uses."""

    value: Any
    told: str
    names: frozenset[str]


def _functions_of(value: Any, names: Collection[str]) -> list[types.FunctionType]:
    """Return the functions of the user's that an object has under some names, and those that they name in turn."""
    found: dict[types.FunctionType, None] = {}
    waiting, seen = list(names), set(names)
    while waiting:
        name = waiting.pop()
        member = vars(value).get(name, inspect.getattr_static(type(value), name, None))
        member = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(member, types.FunctionType) and is_own_code(member.__code__.co_filename):
            found.setdefault(member)
            new = set(_names_in(member.__code__)) - seen
            seen |= new
            waiting += new
    return list(found)


def _names(slot: _Slot, name: object) -> bool:
    return not slot.names or name in slot.names


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it has no value yet
        return []


def _values_of(known: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    return [known.get(name) for name in names]


def has_attributes(value: Any) -> bool:
    """Return True for an object whose state is that of its attributes; those of pipecut are left alone."""
    is_ours = type(value).__module__.partition(".")[0] == __name__.partition(".")[0]
    return isinstance(value, nn.Module | types.SimpleNamespace) or (is_plain_object(value) and not is_ours)


def used_variables(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Yield the variables of modules that a function uses: the name of the module, its namespace, and their names."""
    names = set(_names_in(function.__code__))
    known = function.__globals__
    yield str(known.get("__name__", "its module")), known, {name for name in names if not _is_fixed(known.get(name))}
    for name in names:
        module = known.get(name)
        if isinstance(module, types.ModuleType) and is_own_code(getattr(module, "__file__", None)):
            inside = {each for each in names if each in vars(module) and not _is_fixed(vars(module)[each])}
            yield module.__name__, vars(module), inside


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of variables and attributes that code uses."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_fixed(value: Any) -> bool:
    return isinstance(value, types.ModuleType | types.BuiltinFunctionType)


_INSTALLED = tuple({sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_PIPECUT = str(Path(__file__).resolve().parent.parent)


def is_own_code(file: str | None) -> bool:
    """Return True for code of the user: neither installed nor part of pipecut; what is typed in has no real file."""
    return file is not None and not file.startswith((*_INSTALLED, _PIPECUT, "<frozen"))


def is_own_class(cls: type) -> bool:
    """Return True for a class of the user's own code."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ == "__main__" or is_own_code(getattr(module, "__file__", None))
