"""Repeated modules: a call like an earlier one of an equal module is not computed again.

Its code runs all the same. Each torch function that it calls, and each module, is compared with what the earlier call
did at that place: the function, its plain arguments, and where its tensors come from. The code gets the tensors of the
earlier call, and what that has left in the history and the trace is copied, with the names and tensors of this one.
So nothing is taken for equal that was not seen to be: a flag, a counter or a global by which the code decides shows
as another function or argument, and the run is made again, without this shortcut for that module.

Tensors that outlive a call, as its results or in a cache, are made anew for each call. Those that nobody holds on to
are known by their reference counts.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...torch_internals import (
    STATE_DICTS,
    ambient_modes,
    buffers_of,
    children_of,
    parameters_of,
    references_to,
    torch_functions_off,
    unproxied,
    version_of,
)
from ..structure import flatten, nested_tensors, unflatten
from ..traced import PLAIN_TYPES, Template
from .events import Called, Entered, Event, Left, Numbers, Repeated, RepeatedEvents, TensorNumber, moved, spec_of


class DivergedError(Exception):
    """Raised where the call of a module does something else than an earlier one that it was taken to be like."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path!r} {why}")
        self.path = path


_LEAST_MODULES = 3  # in a module that is worth the comparison


class Repeats:
    """Modules of a model that look alike, by their paths; those that turned out to differ are left out.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
    >>> Repeats(model).groups
    {'0': 0, '1': 0, '2': 0}
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups = _groups(model)
        self._diverged: collections.Counter[int] = collections.Counter()

    def leave_out(self, path: str) -> None:
        """Compute the calls of a module as if nothing were like it; after a second one, of all of its group."""
        group = self.groups.pop(path)
        self._diverged[group] += 1
        if self._diverged[group] > 1:
            self.groups = {each: number for each, number in self.groups.items() if number != group}


def _groups(model: nn.Module) -> dict[str, int]:
    """Return a number for each module that others look like; of a module and those inside it, for one of them only."""
    numbers: dict[Any, int] = {}
    sizes: dict[int, int] = {}
    members: dict[int, list[str]] = {}

    def describe(path: str, module: nn.Module) -> int:
        children = {name: child for name, child in children_of(module).items() if child is not None}
        inside = tuple((name, describe(f"{path}.{name}".lstrip("."), child)) for name, child in children.items())
        number = numbers.setdefault((_looks(module), inside), len(numbers))
        sizes[number] = 1 + sum(sizes[each] for _, each in inside)
        members.setdefault(number, []).append(path)
        return number

    describe("", model)
    worth = {number: sizes[number] * (len(paths) - 1) for number, paths in members.items()}
    found: dict[str, int] = {}
    around: set[str] = set()
    for number in sorted(members, key=lambda number: -worth[number]):
        paths = members[number]
        if worth[number] and sizes[number] >= _LEAST_MODULES and not _overlap(paths, found, around):
            found |= dict.fromkeys(paths, number)
            around.update(above for path in paths for above in _ancestors(path))
    return {path: sorted(set(found.values())).index(number) for path, number in found.items()}


def _overlap(paths: Sequence[str], found: Mapping[str, int], around: set[str]) -> bool:
    return any(path in around or path in found or any(up in found for up in _ancestors(path)) for path in paths)


def _ancestors(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _looks(module: nn.Module) -> Any:
    """Return what can be seen of a module itself: its class, tensors and plain attributes.

    Of whole numbers only the names: many modules know their place among others. Whatever comes of that is compared.
    """
    tensors = (*parameters_of(module).items(), *buffers_of(module).items())
    attributes = ((name, value) for name, value in vars(module).items() if name not in STATE_DICTS)
    return (
        type(module),
        tuple((name, None if tensor is None else spec_of(tensor)) for name, tensor in tensors),
        tuple((name, _shown(value)) for name, value in attributes),
    )


def _shown(value: Any) -> Any:
    if type(value) is int or not isinstance(value, PLAIN_TYPES):
        return type(value).__name__
    return type(value).__name__, repr(value)


@dataclass
class RecordedCall:
    """A call that has been computed, as calls like it are compared with.

    `first` is its first event, `numbers` and `storages` where those of its own tensors begin. `results` are those of
    its functions, by the number of the event. `is_fit` is False if another call cannot be compared with it.
    """

    path: str
    first: int
    depth: int  # the number of calls around it
    numbers: int
    storages: int
    tensors: list[Tensor]  # of the arguments
    state: dict[str, int]  # numbers of parameters and buffers, by their names in the module
    unseen: int
    is_fit: bool = True
    events: tuple[Event, ...] = ()
    end: int = 0  # of its numbers
    storages_end: int = 0
    met: frozenset[int] = frozenset()  # tensors from elsewhere that it was the first to use
    specs: dict[int, Any] = field(default_factory=dict)  # of its own tensors
    results: dict[int, Template] = field(default_factory=dict)
    ambient: dict[int, Any] = field(default_factory=dict)
    floats: dict[int, tuple[float, ...]] = field(default_factory=dict)
    template: RepeatedEvents | None = None
    of_trace: Any = None  # its span and nodes, if there is a tracer

    def owns(self, number: int) -> bool:
        """Return True for a tensor that was made inside."""
        return self.numbers <= number < self.end and number not in self.met


class _Recorder(Protocol):
    """The parts of a recorder of histories that a follower needs."""

    floats: list[float]

    def frozen(self, value: Any) -> Any: ...


class RepeatedCalls:
    """Calls of one run that others may be like."""

    def __init__(self, repeats: Repeats | None) -> None:
        self._groups = repeats.groups if repeats is not None else {}
        self._known: dict[Any, RecordedCall] = {}
        self._key: Any = None
        self.open: RecordedCall | None = None

    def may_repeat(self, path: str) -> bool:
        """Return True for a module that others look like, unless it is inside of a call that is recorded."""
        return self.open is None and path in self._groups

    def begin(
        self,
        path: str,
        tensors: list[Tensor],
        frozen: Any,
        state: dict[str, int],
        at: int,
        depth: int,
        numbers: Numbers,
    ) -> RecordedCall | None:
        """Return an earlier call like one that begins, or begin to record it if there is none."""
        key = self._groups[path], _pattern(tensors, numbers), _without_tensors(frozen), ambient_modes()
        known = self._known.get(key)
        if known is not None:
            return known
        self._key = key
        self.open = RecordedCall(path, at, depth, numbers.count, numbers.storages, tensors, state, numbers.unseen)
        return None

    def forget(self, call: RecordedCall) -> None:
        """Record the next call like one of this module anew."""
        self._known = {key: known for key, known in self._known.items() if known is not call}

    def finish(self, events: Sequence[Event | Repeated], numbers: Numbers) -> None:
        """End the call that is being recorded."""
        call, self.open = self.open, None
        assert call is not None
        call.events = tuple(event for event in events[call.first :] if not isinstance(event, Repeated))
        call.end, call.storages_end = numbers.count, numbers.storages
        call.met = frozenset(number for number in numbers.met if number >= call.numbers)
        is_own = all(
            call.owns(number) for event in call.events if isinstance(event, Called) for number in event.written
        )
        left = [event for event in call.events if isinstance(event, Left)]
        clear = all(not event.buffers and len(dict(event.handed_on)) == len(set(event.handed_on)) for event in left)
        call.is_fit = call.is_fit and is_own and clear and numbers.unseen == call.unseen
        if call.is_fit:
            own = (number for number in range(call.numbers, call.end) if call.owns(number))
            call.specs = {number: spec_of(numbers.tensors[number]) for number in own if number in numbers.tensors}
            given = [*enumerate(map(numbers.of, call.tensors)), *sorted(call.state.items())]
            call.template = RepeatedEvents.of(call.events, given, call.owns, call.storages)
            self._known[self._key] = call


def _pattern(tensors: Sequence[Tensor], numbers: Numbers) -> Any:
    """Return the specs of tensors, and which of them are one, or lie in one memory."""
    same = [numbers.of(tensor) for tensor in tensors]
    memory = [numbers.storage(tensor) for tensor in tensors]
    return tuple((spec_of(tensor), same.index(same[at]), memory.index(memory[at])) for at, tensor in enumerate(tensors))


def _without_tensors(frozen: Any) -> Any:
    if isinstance(frozen, TensorNumber):
        return TensorNumber
    return tuple(map(_without_tensors, frozen)) if isinstance(frozen, tuple) else frozen


class Follower:
    """Comparison of one call, while its code runs, with an earlier one that it is like."""

    def __init__(self, call: RecordedCall, path: str, nth_call: int, numbers: Numbers) -> None:
        self.call, self.path, self.nth_call, self._numbers = call, path, nth_call, numbers
        self.nth_calls: list[int] = []
        self._paths: dict[str, str] = {}  # of modules of this call, by those of the other; the same if they share one
        self.own: dict[int, Tensor] = {}  # tensors of this call, by the numbers that stand for them in the other
        self._number_of: dict[int, int] = {}  # these numbers, by the ids of the tensors
        self._memories: dict[int, int] = {}
        self._at = 0
        self._depth = 0
        self._fresh: set[int] = set()
        self._counts: dict[int, int] = {}

    def begin(self, tensors: Sequence[Tensor], state: Mapping[str, int]) -> bool:
        """Pair the tensors of both calls; return False if that is not possible."""
        call, numbers = self.call, self._numbers
        if call.state.keys() != state.keys() or len(call.tensors) != len(tensors):
            return False
        pairs = [(numbers.of(one), other) for one, other in zip(call.tensors, tensors, strict=True)]
        pairs += [(number, numbers.tensors[state[name]]) for name, number in call.state.items()]
        for number, tensor in pairs:
            memory = numbers.storage(numbers.tensors[number]), numbers.storage(tensor)
            if (
                spec_of(numbers.tensors[number]) != spec_of(tensor)
                or self.own.setdefault(number, tensor) is not tensor
                or self._number_of.setdefault(id(tensor), number) != number
                or self._memories.setdefault(*memory) != memory[1]
            ):
                return False
        return self._find_fresh()

    def _find_fresh(self) -> bool:
        """Find the tensors that others hold on to, and count the references to all others."""
        call, tensors = self.call, self._numbers.tensors
        left = call.events[-1]
        assert isinstance(left, Left)
        self._fresh = {number for _, number in left.handed_on if call.owns(number)}
        for number in range(call.numbers, call.end):
            if number in tensors and number not in self._fresh and number not in call.met:
                count = references_to(tensors[number])
                if count > _OWN_REFERENCES:
                    self._fresh.add(number)
                else:
                    self._counts[number] = count
        memories = [self._numbers.storage(tensors[number]) for number in self._fresh]
        return len(set(memories)) == len(memories) and all(memory >= call.storages for memory in memories)

    @property
    def given(self) -> dict[int, Tensor]:
        """Arguments and state of this call, by the numbers of those of the other."""
        return {number: tensor for number, tensor in self.own.items() if number not in self._fresh}

    @property
    def made(self) -> dict[int, Tensor]:
        """The tensors that were made for this call, by the numbers of those of the other."""
        return {number: tensor for number, tensor in self.own.items() if number in self._fresh}

    def of(self, tensor: Tensor) -> int:
        """Return the number that stands for a tensor in the other call."""
        number = self._number_of.get(id(tensor))
        if number is None:
            number = self._numbers.of(tensor)
            if number in self.own or number in self._fresh:
                return -1  # of the other call itself
        return number

    def module_path(self, path: str) -> str | None:
        """Return the path of a module in the other call; None for one that is no counterpart of another."""
        other = moved(path, self.path, self.call.path)
        return other if self._paths.setdefault(other, path) == path else None

    def own_path(self, path: str) -> str:
        """Return the path of a module of the other call in this one."""
        return self._paths.get(path) or moved(path, self.call.path, self.path)

    def fail(self, why: str) -> DivergedError:
        """Return the error for a difference."""
        return DivergedError(self.path, f"{why}, unlike {self.call.path!r}")

    def function(self, func: Any, args: Any, kwargs: Any, recorder: _Recorder) -> Any:
        """Return what a torch function returned in the other call, or call it if it makes no tensors."""
        event = self.call.events[self._at]
        if isinstance(event, Called) and event.function == func:
            with torch_functions_off():
                at = self.call.first + self._at
                recorder.floats.clear()
                same = recorder.frozen((args, kwargs)) == event.args
                if same and tuple(recorder.floats) == self.call.floats[at] and ambient_modes() == self.call.ambient[at]:
                    self._at += 1
                    return self._given(self.call.results[at])
        with torch_functions_off():
            versions = [(tensor, version_of(tensor)) for tensor in nested_tensors((args, kwargs))]
            result = func(*args, **kwargs)
            makes = getattr(func, "namespace", "") == "pipecut" or next(nested_tensors(result), None) is not None
            if makes or any(version_of(tensor) != version for tensor, version in versions):
                raise self.fail(f"calls {getattr(func, '__name__', func)} with other arguments or at another place")
            return result

    def entered(self, path: str, nth_call: int, args: Any) -> None:
        """Compare the call of a module inside."""
        event = self._next()
        if not isinstance(event, Entered) or (event.path, event.args) != (self.module_path(path), args):
            raise self.fail(f"calls {path!r} with other arguments or at another place")
        self.nth_calls.append(nth_call)
        self._depth += 1

    def left(self, result: Any, output: Any, buffers: Mapping[str, Tensor]) -> Any:
        """Compare the end of a module's call; return its result as the caller gets it."""
        event = self._next()
        if not isinstance(event, Left) or event.result != result or buffers:
            raise self.fail("returns something else")
        self._depth -= 1
        leaves, structure = flatten(output, holders=True)
        given = iter(event.handed_on)
        changed = [self._handed_on(leaf, given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return output
        return unflatten(structure, changed)

    def _handed_on(self, leaf: Tensor, pairs: Iterator[tuple[int, int]]) -> Tensor:
        own, given = next(pairs)
        return leaf if own == given else self._tensor(given)

    @property
    def is_finished(self) -> bool:
        """True if the call has ended."""
        return self._depth < 0

    def finish(self) -> None:
        """Check that all was done, and that nobody holds on to tensors of the other call."""
        if self._at != len(self.call.events):
            raise self.fail("does less")
        tensors = self._numbers.tensors
        if any(references_to(tensors[number]) != count for number, count in self._counts.items()):
            raise self.fail("keeps a tensor")

    def _next(self) -> Event | None:
        at, self._at = self._at, self._at + 1
        return self.call.events[at] if at < len(self.call.events) else None

    def _given(self, result: Template) -> Any:
        leaves = [self._tensor(leaf.number) if isinstance(leaf, TensorNumber) else leaf for leaf in result.leaves]
        return leaves[0] if result.structure.rebuild is None else unflatten(result.structure, leaves)

    def _tensor(self, number: int) -> Tensor:
        known = self.own.get(number)
        if known is not None:
            return known
        tensor = self._numbers.tensors[number]
        if number not in self._fresh:
            return tensor
        with torch_functions_off(), unproxied():
            made = tensor.clone()
        if spec_of(made) != self.call.specs[number]:
            raise self.fail("returns a tensor that cannot be made like one")
        self.own[number] = made
        self._number_of[id(made)] = number
        return made

    # The copy of what the other call has left behind.

    def copied(self) -> Repeated:
        """Return what stands for the events of this call, and give its tensors their numbers."""
        call, numbers = self.call, self._numbers
        assert call.template is not None
        shift = numbers.count - call.numbers
        numbers.count += call.end - call.numbers
        memories = {number: numbers.new_storage() for number in range(call.storages, call.storages_end)}
        memories |= self._memories
        for number, tensor in self.made.items():
            numbers.adopt(tensor, number + shift, memories[numbers.storage(numbers.tensors[number])])
        known = {number: numbers.of(tensor) for number, tensor in self.given.items()}
        kept, paths = tuple(sorted(self.made)), (call.path, self.path)
        nth_calls, modules = tuple(self.nth_calls), dict(self._paths)
        return Repeated(call.template, self.nth_call, paths, modules, shift, known, memories, nth_calls, kept)


_NUMBERED = {0: torch.empty(0)}
_OWN_REFERENCES = references_to(_NUMBERED[0])  # to a tensor that only the table of numbers has
