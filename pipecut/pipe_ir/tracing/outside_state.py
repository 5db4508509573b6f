"""State of Python's that the forwards of a model change: which module changes it, and which decides by it.

A run is looked at wherever a module's call begins or ends. In a further run the numbers that were changed are replaced
by some that report where they are used: a count by which nothing is decided is no more than a count. Clocks, the
system's random numbers and iterators report their uses too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...torch_internals import buffers_of, parameters_of
from ..structure import holds_same
from ..surroundings import Place, Surroundings, attributes_of
from .events import Effect, History, KeptValue
from .records import is_users_code


def changed_places(surroundings: Surroundings, model: nn.Module) -> list[Place]:
    """Return the objects that hold other values than when they were noted, besides the tensors that a model has."""
    own = {id(tensors) for module in model.modules() for tensors in (parameters_of(module), buffers_of(module))}
    return [
        place
        for place, before in surroundings.places()
        if id(place.holder) not in own and _is_changed(before, place.read())
    ]


def _is_changed(before: Any, now: Any) -> bool:
    if isinstance(before, dict) and isinstance(now, dict) and holds_same(now, before):
        return False
    return next(_changed_names(before, now), _SAME) is not _SAME


NUMBER = "a number that changes from call to call"
_SAME = object()
_VALUES = (bool, int, float, complex, str, bytes, set)  # compared by value; all else by identity


def _changed_names(before: Any, now: Any) -> Iterator[Any]:
    """Yield the names under which two copies of an object have different values; None if they have no names.

    >>> list(_changed_names({"calls": 1, "cache": None}, {"calls": 2, "cache": None}))
    ['calls']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        yield from (name for name, value in now.items() if not _is_same(before.get(name, _SAME), value))
        yield from (name for name in before if name not in now)
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now) or not all(map(_is_same, before, now)):
            yield None
    elif not _is_same(before, now):
        yield None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _VALUES and one == other)


class StateWatch:
    """Watches a few places during runs: `look` says which module has changed them, numbers report who uses them.

    >>> from types import SimpleNamespace
    >>> counts, around = SimpleNamespace(calls=0), Surroundings()
    >>> around.note([vars(counts)])
    >>> watch = StateWatch([place for place, _ in around.places()])
    >>> counts.calls += 1
    >>> watch.look("block")
    >>> watch.begin_again()
    >>> counts.calls += 1
    >>> watch.look("block")
    >>> used: list[str] = []
    >>> watch.replace_numbers(lambda what: used.append(what) or "block")
    >>> counts.calls += 1
    >>> len(used), counts.calls > 5, used
    (0, False, ["'calls', a number that changes from call to call"])
    """

    def __init__(self, places: Collection[Place]) -> None:
        self._places = list(places)
        self._now = [place.read() for place in self._places]
        self._changes: dict[tuple[int, Any, str], None] = {}
        self._before: set[tuple[int, Any]] = set()  # changed in runs before this one
        self._again: set[tuple[int, Any]] = set()  # and changed in this one too
        self._uses: dict[tuple[int, Any], set[str]] = {}

    def look(self, path: str) -> None:
        """Note what was changed since the last look, by the module at a path."""
        for number, place in enumerate(self._places):
            now = place.read()
            for name in _changed_names(self._now[number], now):
                self._changes.setdefault((number, name, path))
                if (number, name) in self._before:
                    self._again.add((number, name))
            self._now[number] = now

    def begin_again(self) -> None:
        """Begin another run like the last: what does not change in it has settled, as the size of a cache."""
        self._before = {(number, name) for number, name, _ in self._changes}

    def arrays_changed(self) -> Iterator[str]:
        """Yield the modules that write to an array in every run."""
        for number, name, path in self._changes:
            if isinstance(self._now[number], bytes) and (number, name) in self._again:
                yield path

    def replace_numbers(self, on_use: Callable[[str], str]) -> None:
        """Replace the numbers that change in every run by others that report their uses.

        `on_use` gets what is used in words, and returns the path of the module that does so.
        """
        for number, place in enumerate(self._places):
            names = {name for nth, name in self._again if nth == number}
            values = self._now[number]
            if isinstance(values, dict):
                watched = {name: self._watched(values[name], number, name, on_use) for name in names & values.keys()}
                place.write({**values, **watched})
            elif names and isinstance(values, list):
                place.write([self._watched(value, number, None, on_use) for value in values])
            elif names:
                place.write(self._watched(values, number, None, on_use))
            self._now[number] = place.read()

    def _watched(self, value: Any, number: int, name: Any, on_use: Callable[[str], str]) -> Any:
        if type(value) not in (int, float):
            return value

        def use() -> None:
            self._uses.setdefault((number, name), set()).add(on_use(NUMBER if name is None else f"{name!r}, {NUMBER}"))

        return _WatchedNumber(value, use)

    def kept(
        self, surroundings: Surroundings, originals: Mapping[int, Any], paths: Mapping[int, str]
    ) -> Iterator[KeptValue]:
        """Yield what was changed. `originals` has the user's object for the id of a copy, `paths` those of modules.

        A list, dict or object is also what its own holder has under a name: somebody may put another one there.
        """
        changed = {id(self._places[number].holder) for number, _, _ in self._changes}
        above: dict[int, list[tuple[Any, Any]]] = {}
        for place, values in surroundings.places():
            for name, value in values.items() if isinstance(values, dict) else [(None, values)]:
                for number in changed & {id(value), id(attributes_of(value))}:
                    above.setdefault(number, []).append((place.holder, name))
        for number, name, path in self._changes:
            used_by = frozenset(self._uses.get((number, name), ()))
            settles = (number, name) not in self._again
            holder = self._places[number].holder
            for each, its_name in ((holder, name), *above.get(id(holder), ())):
                of_module = paths.get(id(each))
                is_copied = of_module is not None or id(each) in originals
                original = None if of_module is not None else originals.get(id(each), each)
                yield KeptValue(path, original, its_name, of_module, is_copied, used_by, settles)


def uses_in(history: History, path: str, error: str | None) -> tuple[Effect, ...]:
    """Return the uses of watched numbers in a run; with an error, one of them went where no number can, in `path`."""
    end = () if error is None else (Effect(path, f"{NUMBER} ({error})", is_use=True),)
    return *(effect for effect in history.effects if effect.is_use), *end


_OTHER = 1_000_003  # the distance between a number and its text


class _WatchedNumber:
    """Stands for a number, and reports each use that is more than to compute another number from it.

    Its text is that of another number: where it becomes a part of a longer one, whatever is decided by that shows.

    >>> used = []
    >>> count = _WatchedNumber(3, lambda: used.append("used"))
    >>> count += 1
    >>> len(used), count % 4 == 0, used
    (0, True, ['used'])
    """

    def __init__(self, value: float, on_use: Callable[[], object]) -> None:
        self._value, self._on_use = value, on_use

    def used(self) -> Any:
        """Report a use, and return the number."""
        self._on_use()
        return self._value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(without_watch, args), **{name: without_watch(each) for name, each in (kwargs or {}).items()})

    def __str__(self) -> str:
        return _WatchedText.of(str(self._value + _OTHER), self._on_use)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return _WatchedText.of(format(self._value + _OTHER, spec), self._on_use)


class _WatchedText(str):
    """The text of a number; it may be printed, and reports if it is compared, looked up or taken apart.

    >>> used = []
    >>> count = _WatchedNumber(3, lambda: used.append("used"))
    >>> text = f"{count}"
    >>> len(used), text == "3", used
    (0, False, ['used'])
    """

    _on_use: Callable[[], object]

    @classmethod
    def of(cls, text: str, on_use: Callable[[], object]) -> str:
        """Return a text that calls `on_use` for each use."""
        made = cls(text)
        made._on_use = on_use
        return made


def without_watch(value: Any) -> Any:
    """Return the number that a _WatchedNumber stands for, which is a use of it; anything else as it is."""
    if type(value) is _WatchedNumber:
        return value.used()
    if type(value) in (tuple, list):
        return type(value)(map(without_watch, value))
    return value


def _computing(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: _WatchedNumber, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            self.used()
        values = [self._value, *(other._value if type(other) is _WatchedNumber else other for other in others)]
        result = function(*(reversed(values) if swapped else values))
        if type(result) is tuple:  # of divmod
            return tuple(_WatchedNumber(each, self._on_use) for each in result)
        return _WatchedNumber(result, self._on_use) if type(result) in (int, float) else result

    return method


def _using(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(self.used(), *map(without_watch, others))


_COMPUTING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
for _name in (*_COMPUTING, "divmod"):
    _function = getattr(operator, f"__{_name}__", divmod)
    setattr(_WatchedNumber, f"__{_name}__", _computing(_function))
    setattr(_WatchedNumber, f"__r{_name}__", _computing(_function, swapped=True))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(_WatchedNumber, f"__{_name}__", _computing(getattr(operator, f"__{_name}__")))
for _name in ("floor", "ceil", "trunc"):
    setattr(_WatchedNumber, f"__{_name}__", _computing(getattr(math, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "index"):
    setattr(_WatchedNumber, f"__{_name}__", _using(getattr(operator, f"__{_name}__")))
_CONVERSIONS: tuple[Callable[..., Any], ...] = (bool, int, float, hash, round)
for _convert in _CONVERSIONS:
    setattr(_WatchedNumber, f"__{_convert.__name__}__", _using(_convert))


def _reporting(name: str) -> Callable[..., Any]:
    def method(self: _WatchedText, *args: Any) -> Any:
        self._on_use()
        return getattr(str, name)(self, *args)

    return method


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "contains", "getitem")
for _name in (*(f"__{_name}__" for _name in _COMPARISONS), "startswith", "endswith", "find", "index", "count"):
    setattr(_WatchedText, _name, _reporting(_name))


class _WatchedIterator:
    """Stands for an iterator whose state Python does not show: numbers report their uses, all else reports at once."""

    def __init__(self, iterator: Iterator[Any], on_use: Callable[[], object]) -> None:
        self._iterator, self._on_use = iterator, on_use

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _reported(next(self._iterator), self._on_use)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _reported(value: Any, on_use: Callable[[], object]) -> Any:
    """Return a value from outside: a number that reports its uses; anything else that tells something is one use."""
    if type(value) in (int, float):
        return _WatchedNumber(value, on_use)
    if value is not None and not (isinstance(value, io.IOBase) and not value.readable()):
        on_use()
    return value


class _Source:
    """Stands for a function that asks the system: the clock, its random numbers, files.

    Only what the user's code asks for is reported, itself or through the standard library, in one thread.
    """

    def __init__(self, function: Callable[..., Any], on_use: Callable[[], object]) -> None:
        self._function, self._on_use = function, on_use
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._function(*args, **kwargs)
        if threading.get_ident() != self._thread or not _is_for_the_user(sys._getframe(1)):
            return value
        if any(value is each for each in args):  # os.fspath and the like ask nobody
            return value
        return _reported(value, self._on_use)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


# Parts of the standard library that ask the system on their own account.
_FOR_THEMSELVES = frozenset({"logging", "warnings", "importlib", "linecache", "inspect", "traceback", "tokenize"})
_SYSTEM = ("time", "posix", "nt")  # modules whose functions ask the system
_NAMED_IN = ("time", "os", "posix", "nt", "random", "io", "builtins")  # where the standard library has them


def _is_for_the_user(frame: types.FrameType | None) -> bool:
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _FOR_THEMSELVES:
            return False
        if package not in sys.stdlib_module_names or package == "__main__":
            return is_users_code(frame.f_code.co_filename)
        frame = frame.f_back
    return False


@contextlib.contextmanager
def watched_sources(places: Iterable[tuple[Place, Any]], on_use: Callable[[str], object]) -> Iterator[None]:
    """Let what the system and iterators tell report its uses: `on_use` gets what it is in words.

    A function is replaced where Python has it, and in the places where the user's code has it under a name.
    """
    sources = {
        function: _Source(function, functools.partial(on_use, f"{function.__module__}.{function.__name__}()"))
        for function in _system_functions()
    }
    known = [_Names(dict(own), own.get, own.__setitem__) for own in _standard_library()]
    known += [_Names.in_place(place, values) for place, values in places if isinstance(values, dict)]
    kinds = {type(value) for names in known for value in names.values.values()}
    asked = {kind for kind in kinds if kind is types.BuiltinFunctionType or _is_iterator(kind)}
    replaced = [
        (names, name, value, made)
        for names in known
        for name, value in names.values.items()
        if type(value) in asked and (made := _stand_in(value, sources, on_use)) is not None and names.get(name) is value
    ]
    try:
        for names, name, _, made in replaced:
            names.put(name, made)
        yield
    finally:
        for names, name, value, made in replaced:
            if names.get(name) is made:
                names.put(name, value)


class _Names(NamedTuple):
    """Names with their values, and the way to read and to replace one."""

    values: Mapping[Any, Any]
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], None]

    @classmethod
    def in_place(cls, place: Place, values: Mapping[Any, Any]) -> _Names:
        """Return the names that an object has."""
        return cls(
            values,
            lambda name: place.read().get(name),
            lambda name, value: place.write({**place.read(), name: value}),
        )


def _standard_library() -> list[dict[str, Any]]:
    return [vars(sys.modules[name]) for name in _NAMED_IN if name in sys.modules]


def _system_functions() -> list[Callable[..., Any]]:
    found = [value for name in _SYSTEM if name in sys.modules for value in vars(sys.modules[name]).values()]
    return [open, *(value for value in found if type(value) is types.BuiltinFunctionType)]


def _stand_in(value: Any, sources: Mapping[Any, _Source], on_use: Callable[[str], object]) -> Any:
    if type(value) is types.BuiltinFunctionType:
        return sources.get(value)
    return _WatchedIterator(value, functools.partial(on_use, "an iterator"))


def _is_iterator(cls: type) -> bool:
    """Return True for a class of iterators whose next value is not computed in Python, where it could be looked at."""
    # Not cached: a cache of classes would keep those that a run makes for its modules, and with them all of the run.
    return isinstance(getattr(cls, "__next__", None), types.WrapperDescriptorType)
