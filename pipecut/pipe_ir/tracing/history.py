"""History of one run of a model: the calls of torch functions and of modules, with all that was passed to them.

A trace holds what a forward did once. Its history is taken at a level at which a run without a tracer can be recorded
too, so that what a forward does when it runs again can be compared with it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...torch_internals import (
    FakeTensor,
    buffers_of,
    packing_hooks,
    storage_id,
    torch_functions_off,
    unwrapped,
    version_of,
    wraps_for_vmap,
)
from ..operators import is_mark
from ..structure import flatten, nested_tensors
from ..traced import PLAIN_TYPES
from .events import Called, Effect, Entered, Event, History, Left, Line, SizeExpression, TensorNumber
from .records import is_users_code

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Numbers:
    """Numbers of the tensors of one run, or of several in a row: what one leaves behind, the next may use.

    The tensors are kept alive, as their identities count.
    """

    count: int = 0
    known: dict[int, int] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    _storages: dict[int, int] = field(default_factory=dict)
    _last_made: dict[int, int] = field(default_factory=dict)  # in each storage
    _alive: list[Tensor] = field(default_factory=list)

    def of(self, tensor: Tensor) -> int:
        """Return the number of a tensor; one that is met for the first time comes from elsewhere.

        If it lies in the memory of one that is known, it is that one: torch.vmap wraps and unwraps tensors unseen.
        """
        number = self.known.get(id(tensor))
        if number is None:
            number = self._last_made.get(self.storage(tensor))
            if number is None:
                number = self._next(tensor)
                if not isinstance(unwrapped(tensor), FakeTensor):
                    self.constants[number] = tensor
            else:
                self._keep(tensor, number)
        return number

    def new(self, tensor: Tensor) -> int:
        """Return the number of a tensor that the run itself has made."""
        number = self.known.get(id(tensor))
        if number is None:
            number = self._next(tensor)
            self._last_made[self.storage(tensor)] = number
        self.constants.pop(number, None)
        return number

    def storage(self, tensor: Tensor) -> int:
        """Return the number of the memory that a tensor is in; a negative one if it has none to speak of."""
        try:
            memory = storage_id(unwrapped(tensor))
        except (NotImplementedError, RuntimeError):  # sparse tensors and the like
            return -1 - id(tensor)
        return self._storages.setdefault(memory, len(self._storages))

    def share(self, one: Tensor, other: Tensor) -> None:
        """Treat the memory of one tensor as that of another."""
        with contextlib.suppress(NotImplementedError, RuntimeError):  # as above
            self._storages[storage_id(unwrapped(one))] = self.storage(other)

    def _next(self, tensor: Tensor) -> int:
        number, self.count = self.count, self.count + 1
        self._keep(tensor, number)
        return number

    def _keep(self, tensor: Tensor, number: int) -> None:
        self.known[id(tensor)] = number
        self._alive.append(tensor)


class HistoryRecorder(TorchFunctionMode):
    """Mode that records the history of a run; the calls of modules are reported by whoever watches them."""

    def __init__(self, paths: Mapping[int, str], numbers: Numbers | None = None) -> None:
        super().__init__()
        self._paths = paths  # by the id of a module's own dict
        self._numbers = numbers or Numbers()
        self._events: list[Event] = []
        self._calls: dict[str, int] = {}
        self._open: list[str] = []
        self._paused = 0
        self._inputs: tuple[int, ...] = ()
        self._sizes: tuple[tuple[int, ...], ...] = ()
        self._symbols: dict[Any, tuple[int, int]] = {}
        self._state: dict[str, int] = {}
        self._effects: dict[Effect, None] = {}
        self._packing_before = packing_hooks()

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Note the inputs of a run, and the model's parameters and buffers."""
        with self.paused():
            self._inputs = tuple(self._numbers.new(tensor) for tensor in tensors)
            self._sizes = tuple(tuple(map(_hint, tensor.shape)) for tensor in tensors)
            for nth, tensor in enumerate(tensors):
                sizes: Sequence[Any] = tensor.shape
                for dim, size in enumerate(sizes):
                    if isinstance(size, _SYMBOLIC):
                        self._symbols.setdefault(size.node.expr, (nth, dim))
            for named in (model.named_parameters, model.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    self._state[name] = self._numbers.new(tensor)

    def finish(self) -> History:
        """Return the history, without the tensors of the run."""
        return History(
            tuple(self._events),
            self._inputs,
            self._sizes,
            self._symbols,
            self._state,
            dict(self._numbers.constants),
            tuple(self._effects),
        )

    def forget(self) -> None:
        """Drop the tensors of the run."""
        self._numbers = Numbers()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in a block: the work of an observer."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[int, int]:
        """Note the begin of a module's call; return the numbers of events and of tensors so far."""
        with self.paused():
            path = self._paths[id(vars(module))]
            nth_call = self._calls.get(path, 0)
            self._calls[path] = nth_call + 1
            self._events.append(Entered(path, nth_call, self._flat((args, kwargs)), innermost_line()))
            self._open.append(path)
            return len(self._events), self._numbers.count

    def leave(self, result: Any, handed_on: Any, buffers: Mapping[str, Tensor]) -> None:
        """Note the end of a module's call; `handed_on` is its result as the caller gets it."""
        with self.paused():
            if self._open:  # after an exception, whose trace is dropped, there may be none
                self._open.pop()
            leaves, _ = flatten(result, holders=True)
            given, _ = flatten(handed_on, holders=True)
            pairs = [(a, b) for a, b in zip(leaves, given, strict=True) if isinstance(a, Tensor)]
            self._events.append(
                Left(
                    self._flat(result, holders=True),
                    tuple((self._numbers.of(a), self._numbers.new(b)) for a, b in pairs),
                    tuple((name, self._numbers.of(tensor)) for name, tensor in sorted(buffers.items())),
                )
            )

    def note_effect(self, what: str) -> None:
        """Note an effect of the innermost call."""
        if not self._paused:
            self._note(what)

    def _note(self, what: str) -> None:
        if self._open:
            self._effects.setdefault(Effect(self._open[-1], what))

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._open or wraps_for_vmap(func) or not self.listens():
            return func(*args, **kwargs)
        self.before_call()
        used = list(nested_tensors((args, kwargs)))
        with torch_functions_off():
            versions = [_version(tensor) for tensor in used]
        result = func(*args, **kwargs)
        with torch_functions_off():
            written = [tensor for tensor, was in zip(used, versions, strict=True) if _version(tensor) != was]
            handed_on = self.handed_on(func, result, used, written)
            made = list(nested_tensors(handed_on))
            if made or written or is_mark(func):
                same = {self._numbers.new(handed_on): self._numbers.of(result)} if handed_on is not result else {}
                self._note_call(func, (args, kwargs), used, made, written, same)
        return handed_on

    def handed_on(self, func: Any, result: Any, used: Sequence[Tensor], written: Sequence[Tensor]) -> Any:
        """Return what the caller gets for a result: a trace must not change it."""
        return result

    def listens(self) -> bool:
        """Return False while nothing is to be recorded."""
        return True

    def before_call(self) -> None:
        """Look at the state of the process before a function runs; there is nothing to see in a trace."""

    def _note_call(
        self,
        func: Any,
        args: Any,
        used: Sequence[Tensor],
        made: Sequence[Tensor],
        written: Sequence[Tensor],
        passed_on: Mapping[int, int],
    ) -> None:
        frozen = self._frozen(args)
        known = {id(tensor) for tensor in used}
        if used and "dropout" in getattr(func, "__name__", ""):
            for tensor in made:
                self._numbers.share(tensor, used[0])  # it may return its argument itself, which a trace does not show
        numbers = tuple(self._numbers.of(t) if id(t) in known else self._numbers.new(t) for t in made)
        storages = {self._numbers.of(tensor): self._numbers.storage(tensor) for tensor in (*used, *made)}
        self._note_modes()
        self._events.append(
            Called(
                func,
                frozen,
                numbers,
                tuple(self._numbers.of(tensor) for tensor in written),
                tuple(storages.items()),
                _modes(),
                innermost_line(),
                passed_on,
            )
        )

    def _note_modes(self) -> None:
        """Note modes that a trace does not hold."""
        if torch.is_inference_mode_enabled():
            self.note_effect("torch.inference_mode()")
        hooks = packing_hooks()
        if hooks is not None and hooks is not self._packing_before:
            self.note_effect(f"hooks on saved tensors ({_origin(hooks[0])})")

    def _written_since(self, events: int) -> Iterator[tuple[int, ...]]:
        return (event.written for event in self._events[events:] if isinstance(event, Called))

    def _flat(self, value: Any, *, holders: bool = False) -> Any:
        leaves, structure = flatten(value, holders=holders)
        return tuple(structure.paths()), tuple(map(self._frozen, leaves))

    def _frozen(self, value: Any) -> Any:
        """Return a value of an argument in a form that can be kept and compared."""
        if isinstance(value, Tensor):
            return TensorNumber(self._numbers.of(value))
        if isinstance(value, _SYMBOLIC):
            return SizeExpression(value.node.expr)
        convert = _CONVERSIONS.get(type(value))
        if convert is not None:
            return convert(value, self._frozen)
        if isinstance(value, torch.Generator):
            self._note("a torch.Generator, whose state a trace does not follow")
        if isinstance(value, nn.Module):
            return ("module", self._paths.get(id(vars(value)), type(value).__name__))
        if isinstance(value, tuple | list):
            return tuple(map(self._frozen, value))
        if isinstance(value, PLAIN_TYPES):
            return (type(value).__name__, repr(value))
        if type(value).__module__ == "numpy":
            return ("numpy", repr(getattr(value, "tolist", lambda: value)()))
        return ("object", type(value).__name__)


class TraceHistory(HistoryRecorder):
    """Recorder of the history of a trace. What is traced into a graph of its own, as a branch of torch.cond, is not."""

    def __init__(self, paths: Mapping[int, str], listens: Callable[[], bool]) -> None:
        super().__init__(paths)
        self.listens = listens  # type: ignore[method-assign]


def new_buffers(module: nn.Module, before: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers of a module that are other tensors than before."""
    now = buffers_of(module)
    return {name: tensor for name, tensor in now.items() if tensor is not None and tensor is not before.get(name)}


_CONVERSIONS: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {
    tuple: lambda value, frozen: tuple(map(frozen, value)),
    list: lambda value, frozen: tuple(map(frozen, value)),
    dict: lambda value, frozen: tuple((repr(key), frozen(item)) for key, item in value.items()),
    slice: lambda value, frozen: ("slice", frozen(value.start), frozen(value.stop), frozen(value.step)),
    bool: lambda value, frozen: ("bool", value),
    int: lambda value, frozen: value,
    float: lambda value, frozen: ("float", f"{value:.15g}"),
    str: lambda value, frozen: ("str", value),
    type(None): lambda value, frozen: None,
    # A function that is defined in a forward is another object in every call.
    types.FunctionType: lambda value, frozen: ("function", value.__qualname__),
}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, _SYMBOLIC) else int(size)


def _modes() -> tuple[Any, ...]:
    cast = torch.is_autocast_enabled("cpu")
    return torch.is_grad_enabled(), torch.get_autocast_dtype("cpu") if cast else None


def _origin(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def innermost_line() -> Line | None:
    """Return the innermost line of the user's code that is running, seen from the caller of the caller."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_users_code(frame.f_code.co_filename):
            return Line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None
