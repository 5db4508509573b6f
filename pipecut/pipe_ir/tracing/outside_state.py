"""State of Python's that the forwards of a model change: which module changes it, and which decides by it.

A run is looked at wherever a module's call begins or ends. In a further run the numbers that were changed are replaced
by some that report where they are used: a count by which nothing is decided is no more than a count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from ...torch_internals import buffers_of, parameters_of
from ..surroundings import Place, Surroundings, attributes_of
from .events import KeptValue
from .watched import WatchedNumber


def changed_places(surroundings: Surroundings, model: nn.Module) -> list[Place]:
    """Return the objects that hold other values than when they were noted, besides the tensors that a model has."""
    own = {id(tensors) for module in model.modules() for tensors in (parameters_of(module), buffers_of(module))}
    return [
        place
        for place, before in surroundings.places()
        if id(place.holder) not in own and next(_changed_names(before, place.read()), _SAME) is not _SAME
    ]


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

        return WatchedNumber(value, use)

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
