"""Snapshot of the places outside of a model in which its code can keep a value, and their restoration.

Names of modules, attributes of classes and objects, containers, variables of enclosing functions, default arguments,
`functools.lru_cache` and random generators. They are noted when code that can reach them is about to run.
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import operator
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .named_state import is_own_code
from .structure import holds_same

_MOST = 50_000  # objects that are looked at: a script's globals may hold a data set
_LARGE = 10_000  # elements of a container that is not looked into
_ABSENT = NotImplemented  # stands for a value that is not there; nobody keeps it
_LruCache: Any = type(functools.lru_cache(lambda: None))

# Packages whose code does not keep a model's values: those that run the trace itself, and the standard library.
_MACHINERY = frozenset({"torch", "pipecut", "numpy", "sympy", *sys.stdlib_module_names} - {"__main__"})


def is_machinery(module_name: object) -> bool:
    """Return True for the name of a module of torch, of this package or of the standard library."""
    return str(module_name).partition(".")[0] in _MACHINERY


class _Kind(NamedTuple):
    """A kind of object that keeps values: how it is copied, what it holds, and how it is put back.

    `restore` gets the object and its copy, and returns True if there was something to put back.
    """

    copy: Callable[[Any], Any]
    parts: Callable[[Any], Iterable[Any]]
    restore: Callable[[Any, Any], bool]


def _nothing(_: Any) -> None: ...


def _unchanged(*_: Any) -> bool:
    return False


# A subclass may do more than keep a value: the methods of the built-in types are called in place of its own.


def _copied_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(value))


def _restored_dict(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    cls: Any = collections.OrderedDict if isinstance(now, collections.OrderedDict) else dict
    put, drop = functools.partial(cls.__setitem__, now), functools.partial(cls.__delitem__, now)
    return _restored_names(_copied_dict(now), before, put, drop)


def _restored_names(
    now: Mapping[Any, Any], before: Mapping[Any, Any], put: Callable[[Any, Any], None], drop: Callable[[Any], None]
) -> bool:
    """Put back values by name; new functions, classes and modules stay, for somebody has imported them."""
    if holds_same(now, before):
        return False
    changed = [
        name
        for name, value in now.items()
        if before.get(name, _ABSENT) is not value
        and not isinstance(value, types.ModuleType | types.FunctionType | type)
    ]
    lost = [name for name in before if name not in now]
    for name in changed:
        if name not in before:
            drop(name)
    for name in (*changed, *lost):
        if name in before:
            put(name, before[name])
    return bool(changed or lost)


def _restored_list(now: list[Any], before: list[Any]) -> bool:
    if len(before) == list.__len__(now) and all(map(operator.is_, list.__iter__(now), before)):
        return False
    list.__setitem__(now, slice(None), before)
    return True


def _copied_deque(value: collections.deque[Any]) -> list[Any]:
    return list(collections.deque.__iter__(value))


def _restored_deque(now: collections.deque[Any], before: list[Any]) -> bool:
    if len(before) == collections.deque.__len__(now) and all(map(operator.is_, _copied_deque(now), before)):
        return False
    collections.deque.clear(now)
    collections.deque.extend(now, before)
    return True


def _restored_set(now: set[Any], before: set[Any]) -> bool:
    if set.__len__(now) == len(before) and set.issuperset(now, before):
        return False
    set.clear(now)
    set.update(now, before)
    return True


def _restored_class(cls: type, before: Mapping[str, Any]) -> bool:
    return _restored_names(
        vars(cls),
        before,
        lambda name, value: type.__setattr__(cls, name, value),
        lambda name: type.__delattr__(cls, name),
    )


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _ABSENT


def _restored_cell(cell: types.CellType, before: Any) -> bool:
    if _contents(cell) is before:
        return False
    if before is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = before
    return True


def _cleared_lru_cache(function: Any, misses: int) -> bool:
    """Empty a cache that was added to; an entry alone cannot be taken out."""
    if function.cache_info().misses == misses:
        return False
    function.cache_clear()
    return True


def _may_keep_tensors(names: dict[str, Any]) -> bool:
    """Return True for the names of a module of the user's own code, or of an installed one that knows torch."""
    module = names.get("__name__")
    if is_machinery(module):
        return False
    file = names.get("__file__")
    if module not in _KNOWS_TORCH:
        _KNOWS_TORCH[module] = file is None or is_own_code(file) or any(map(_is_of_torch, list(names.values())))
    return _KNOWS_TORCH[module]


# By the name of a module. Test tools, parsers and the like are large, and a model's values do not get there.
_KNOWS_TORCH: dict[Any, bool] = {}


def _is_of_torch(value: Any) -> bool:
    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(type(value), "__module__", "")
    home = value.__module__ if isinstance(value, type | types.FunctionType) else home
    return str(home).partition(".")[0] == "torch"


def _parts_of_module(module: types.ModuleType) -> Iterable[Any]:
    return (vars(module),) if _may_keep_tensors(vars(module)) else ()


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    if _may_keep_tensors(function.__globals__):
        yield function.__globals__
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def _restored_function(function: types.FunctionType, before: Mapping[str, Any]) -> bool:
    put, drop = functools.partial(setattr, function), functools.partial(delattr, function)
    return _restored_names(dict(vars(function)), before, put, drop)


def _parts_of_class(cls: type) -> Iterator[Any]:
    yield from vars(cls).values()
    yield from cls.__bases__


def _slots(value: Any) -> dict[str, Any]:
    declared = (vars(cls).get("__slots__", ()) for cls in type(value).__mro__)
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return {name: got for name in names if (got := _attribute(value, name)) is not _ABSENT}


def _attribute(value: object, name: str) -> Any:
    """Return an attribute past the __getattr__ of its class, which may load or make something."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _ABSENT


def attributes_of(value: object) -> Any:
    """Return the dict in which an object has its attributes, if it has one."""
    return _attribute(value, "__dict__")


def _parts_of_object(value: Any) -> Iterator[Any]:
    yield type(value)
    yield attributes_of(value)
    yield from _slots(value).values()


def _restored_slots(value: Any, before: dict[str, Any]) -> bool:
    def put(name: str, old: Any) -> None:
        object.__setattr__(value, name, old)

    return _restored_names(_slots(value), before, put, functools.partial(object.__delattr__, value))


def _few(copy: Callable[[Any], Any]) -> Callable[[Any], Iterable[Any]]:
    """Return a function that lists what a container holds, unless that is a lot."""
    return lambda value: found if len(found := copy(value)) <= _LARGE else ()


_BYTES = 1 << 16  # of an array that is looked into: a larger one is data, and no count


def _array_bytes(array: Any) -> bytes | None:
    return array.tobytes() if array.nbytes <= _BYTES and not array.dtype.hasobject else None


def _restored_array(array: Any, before: bytes | None) -> bool:
    if before is None or array.nbytes != len(before) or array.tobytes() == before:
        return False
    array.flat = sys.modules["numpy"].frombuffer(before, array.dtype)
    return True


def _as_array(buffer: Any) -> Any:
    return sys.modules["numpy"].asarray(memoryview(buffer).cast("B"))


def _restored_context(variable: contextvars.ContextVar[Any], before: Any) -> bool:
    if before is not _ABSENT:  # one that had no value cannot be left without again
        variable.set(before)
    return False


_ARRAY = _Kind(_array_bytes, lambda _: (), _restored_array)
_BUFFER = _ARRAY._replace(
    copy=lambda it: _array_bytes(_as_array(it)), restore=lambda it, before: _restored_array(_as_array(it), before)
)
_OBJECT = _Kind(_slots, _parts_of_object, _restored_slots)
_CLASS = _Kind(lambda cls: dict(vars(cls)), _parts_of_class, _restored_class)
_LRU_CACHE = _Kind(lambda it: it.cache_info().misses, lambda it: (it.__wrapped__,), _cleared_lru_cache)
_CONTAINERS: tuple[tuple[type, _Kind], ...] = (
    (dict, _Kind(_copied_dict, _few(lambda it: list(dict.values(it))), _restored_dict)),
    (list, _Kind(list.copy, _few(list.copy), _restored_list)),
    (set, _Kind(set.copy, lambda _: (), _restored_set)),
    (collections.deque, _Kind(_copied_deque, _few(_copied_deque), _restored_deque)),
)
_KINDS: dict[type, _Kind] = {
    **dict(_CONTAINERS),
    tuple: _Kind(_nothing, _few(tuple), _unchanged),
    types.ModuleType: _Kind(_nothing, _parts_of_module, _unchanged),
    types.FunctionType: _Kind(lambda it: dict(vars(it)), _parts_of_function, _restored_function),
    types.MethodType: _Kind(_nothing, lambda it: (it.__self__, it.__func__), _unchanged),
    types.CellType: _Kind(_contents, lambda it: (_contents(it),), _restored_cell),
    functools.partial: _Kind(_nothing, lambda it: (it.func, it.args, it.keywords), _unchanged),
    staticmethod: _Kind(_nothing, lambda it: (it.__func__,), _unchanged),
    classmethod: _Kind(_nothing, lambda it: (it.__func__,), _unchanged),
    property: _Kind(_nothing, lambda it: (it.fget, it.fset), _unchanged),
    _LruCache: _LRU_CACHE,
    types.SimpleNamespace: _OBJECT,
    bytearray: _BUFFER,
    array.array: _BUFFER,
    contextvars.ContextVar: _Kind(lambda it: it.get(_ABSENT), lambda it: (it.get(_ABSENT),), _restored_context),
    threading.local: _Kind(_nothing, lambda it: (vars(it),), _unchanged),
}
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, types.CodeType, types.BuiltinFunctionType,
    types.FrameType, torch.Tensor, torch.dtype, torch.device, type(_ABSENT),
)  # fmt: skip
_PLAIN_CLASSES = frozenset(_PLAIN)  # most values that there are


def _kind_of(cls: type) -> _Kind | None:
    """Return how values of a class keep others; None if they do not, or if that is torch's own matter."""
    if cls in _KINDS:
        return _KINDS[cls]
    if issubclass(cls, _PLAIN):
        return None
    if cls.__module__ == "numpy" and cls.__name__ == "ndarray":
        return _ARRAY
    bases = (kind for base, kind in (*_CONTAINERS, (type, _CLASS)) if issubclass(cls, base))
    home = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {"__name__": cls.__module__}
    is_own = issubclass(cls, nn.Module) or _may_keep_tensors(home) or cls.__module__ == "weakref"
    return next(bases, _OBJECT if is_own else None)


class Generator(NamedTuple):
    """A random generator that belongs to the user: its kind, its first state, and the functions to read and set it."""

    kind: str
    state: Any
    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _generator(value: Any) -> Generator | None:
    read, restore = _state_functions(value)
    kind = f"{type(value).__module__.partition('.')[0].lstrip('_')}.{type(value).__name__}"
    return None if read is None else Generator(kind, read(), read, restore)


def _state_functions(value: Any) -> tuple[Callable[[], Any] | None, Callable[[Any], object]]:
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return value.getstate, value.setstate
    if type(value).__module__.startswith("numpy.random"):
        if hasattr(value, "get_state"):
            return value.get_state, value.set_state
        source = getattr(value, "bit_generator", value)
        if hasattr(source, "state"):
            return lambda: source.state, functools.partial(setattr, source, "state")
    return None, _nothing


class Place(NamedTuple):
    """An object that holds values, and the way to read and to write them."""

    kind: _Kind
    holder: Any

    def read(self) -> Any:
        """Return a copy of the values: by name in a dict, in a list, or one alone."""
        return self.kind.copy(self.holder)

    def write(self, values: Any) -> None:
        """Put values there."""
        self.kind.restore(self.holder, values)


class Surroundings:
    """Snapshot of the objects around a model, as they were when they were noted.

    >>> cache = {}
    >>> def table(size: int) -> list[int]:
    ...     return cache.setdefault(size, list(range(size)))
    >>> around = Surroundings()
    >>> around.note([table, cache])
    >>> _ = table(3)
    >>> around.restore(), cache
    (True, {})
    """

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # by id; the objects are kept, so that no other gets the same
        self._kinds: dict[type, _Kind | None] = {}
        self._copies: list[tuple[_Kind, Any, Any]] = []
        self.generators: list[Generator] = []

    def note(self, roots: Iterable[Any]) -> None:
        """Note what can be reached from some objects, the near ones first."""
        queue, seen, kinds = collections.deque(roots), self._seen, self._kinds
        while queue and len(seen) < _MOST:
            value = queue.popleft()
            cls = type(value)
            if cls in _PLAIN_CLASSES:
                continue
            kind = kinds[cls] if cls in kinds else kinds.setdefault(cls, _kind_of(cls))
            if id(value) in seen or (kind is _CLASS and is_machinery(value.__module__)):
                continue
            if kind is not None:
                seen[id(value)] = value
                if kind.restore is not _unchanged:
                    self._copies.append((kind, value, kind.copy(value)))
                queue.extend(kind.parts(value))
            elif not issubclass(cls, _PLAIN):
                self._note_generator(value)

    def with_more(self, roots: Iterable[Any]) -> Surroundings:
        """Return a snapshot of all this, and of what else can be reached from some objects."""
        more = Surroundings()
        more._seen, more._copies, more.generators = dict(self._seen), list(self._copies), list(self.generators)
        more.note(roots)
        return more

    def _note_generator(self, value: Any) -> None:
        generator = _generator(value)
        if generator is not None and id(value) not in self._seen:
            self._seen[id(value)] = value
            self.generators.append(generator)

    def places(self) -> Iterator[tuple[Place, Any]]:
        """Yield the objects that were noted, with the values that they had; caches of functions are left out."""
        return ((Place(kind, value), copy) for kind, value, copy in self._copies if kind is not _LRU_CACHE)

    def restore(self) -> bool:
        """Put everything back as it was; return True if anything was changed."""
        changed = [kind.restore(value, copy) for kind, value, copy in self._copies]
        return any(changed)

    def restore_generators(self) -> None:
        """Set back the random generators of the user."""
        for generator in self.generators:
            generator.restore(generator.state)
