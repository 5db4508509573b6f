"""History of one run of a model: the calls of torch functions and of modules, with all that was passed to them.

A trace holds what a forward did once. Its history is taken at a level at which a run without a tracer can be recorded
too, so that what a forward does when it runs again can be compared with it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...torch_internals import (
    ambient_modes,
    packing_hooks,
    torch_functions_off,
    version_of,
    wraps_for_vmap,
)
from ..operators import is_mark
from ..structure import flatten, nested_tensors
from ..traced import PLAIN_TYPES, Template
from .branches import is_check
from .events import (
    SYMBOLIC,
    Called,
    Effect,
    Entered,
    Event,
    History,
    Left,
    Line,
    Numbers,
    Repeated,
    SizeExpression,
    TensorNumber,
)
from .records import is_users_code
from .repeats import DivergedError, Follower, RecordedCall, RepeatedCalls, Repeats


class HistoryRecorder(TorchFunctionMode):
    """Mode that records the history of a run; the calls of modules are reported by whoever watches them."""

    def __init__(
        self, paths: Mapping[int, str], numbers: Numbers | None = None, repeats: Repeats | None = None
    ) -> None:
        super().__init__()
        self._paths = paths  # by the id of a module's own dict
        self.numbers = numbers or Numbers()
        self._events: list[Event | Repeated] = []
        self._calls: dict[str, int] = {}
        self._open: list[str] = []
        self._paused = 0
        self._inputs: tuple[int, ...] = ()
        self._sizes: tuple[tuple[int, ...], ...] = ()
        self._symbols: dict[Any, tuple[int, int]] = {}
        self._state: dict[str, int] = {}
        self._effects: dict[Effect, None] = {}
        self._packing_before = packing_hooks()
        self._repeated = RepeatedCalls(repeats)
        self.following: Follower | None = None
        self.diverged: DivergedError | None = None
        self.floats: list[float] = []
        self._is_opaque = False

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Note the inputs of a run, and the model's parameters and buffers."""
        with torch_functions_off():
            self._inputs = tuple(self.numbers.new(tensor) for tensor in tensors)
            self._sizes = tuple(tuple(map(_hint, tensor.shape)) for tensor in tensors)
            for nth, tensor in enumerate(tensors):
                sizes: Sequence[Any] = tensor.shape
                for dim, size in enumerate(sizes):
                    if isinstance(size, SYMBOLIC):
                        self._symbols.setdefault(size.node.expr, (nth, dim))
            for named in (model.named_parameters, model.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    self._state[name] = self.numbers.new(tensor)

    def finish(self) -> History:
        """Return the history, without the tensors of the run."""
        return History(
            tuple(self._events),
            self._inputs,
            self._sizes,
            self._symbols,
            self._state,
            dict(self.numbers.constants),
            tuple(self._effects),
        )

    def forget(self) -> None:
        """Drop the tensors of the run."""
        self.numbers, self._repeated, self.following = Numbers(), RepeatedCalls(None), None

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
        with torch_functions_off():
            path = self._paths[id(vars(module))]
            nth_call = self._calls.get(path, 0)
            self._calls[path] = nth_call + 1
            self._open.append(path)
            flat = self.flat((args, kwargs))
            if self.following is not None:
                with self.noting_divergence():
                    self.following.entered(path, nth_call, flat)
                return 0, 0
            self._events.append(Entered(path, nth_call, flat, innermost_line()))
            self._look_for_repeat(module, path, nth_call, args, kwargs, flat)
            return len(self._events), self.numbers.count

    def _look_for_repeat(self, module: nn.Module, path: str, nth_call: int, args: Any, kwargs: Any, flat: Any) -> None:
        """Follow an earlier call that is like one that begins."""
        if not self._repeated.may_repeat(path):
            return
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        names = [
            name
            for named in (module.named_parameters, module.named_buffers)
            for name, _ in named(remove_duplicate=False)
        ]
        if any(f"{path}.{name}" not in self._state for name in names):
            return  # a buffer that the forward has made
        state = {name: self._state[f"{path}.{name}"] for name in names}
        known = self._repeated.begin(path, tensors, flat, state, len(self._events), len(self._open) - 1, self.numbers)
        if known is None:
            return
        following = Follower(known, path, nth_call, self.numbers)
        if following.begin(tensors, state):
            self.following = following
        else:
            self._repeated.forget(known)

    @property
    def recording(self) -> RecordedCall | None:
        """The call that is computed now, and that later ones may be like."""
        return self._repeated.open

    def leave_followed(self, output: Any, buffers: Mapping[str, Tensor]) -> Any:
        """Compare the end of a module's call with that of the call that is followed; return its result."""
        following = self.following
        assert following is not None
        with torch_functions_off(), self.noting_divergence():
            self._open.pop()
            output = following.left(self.flat(output, holders=True), output, buffers)
            if following.is_finished:
                following.finish()
                self._events.append(following.copied())
                self.following = None
        return output

    def forget_recorded(self, call: RecordedCall) -> None:
        """Compare no call with one that was recorded."""
        self._repeated.forget(call)

    @contextlib.contextmanager
    def noting_divergence(self) -> Iterator[None]:
        """Keep a divergence in mind: the model's code may catch its error."""
        try:
            if self.diverged is not None:
                raise self.diverged
            yield
        except DivergedError as error:
            self.diverged = error
            raise

    def raise_if_diverged(self) -> None:
        """Raise if a call has failed to be like another, or has not ended."""
        if self.diverged is not None:
            raise DivergedError(self.diverged.path, str(self.diverged))  # without the frames of the run
        if self.following is not None:
            raise DivergedError(self.following.path, "raises an error")

    def leave(self, result: Any, handed_on: Any, buffers: Mapping[str, Tensor]) -> None:
        """Note the end of a module's call; `handed_on` is its result as the caller gets it."""
        with torch_functions_off():
            if self._open:  # after an exception, whose trace is dropped, there may be none
                self._open.pop()
            leaves, _ = flatten(result, holders=True)
            given, _ = flatten(handed_on, holders=True)
            pairs = [(a, b) for a, b in zip(leaves, given, strict=True) if isinstance(a, Tensor)]
            self._events.append(
                Left(
                    self.flat(result, holders=True),
                    tuple((self.numbers.of(a), self.numbers.new(b)) for a, b in pairs),
                    tuple((name, self.numbers.of(tensor)) for name, tensor in sorted(buffers.items())),
                )
            )
            if self.recording is not None and len(self._open) == self.recording.depth:
                self._repeated.finish(self._events, self.numbers)

    def cannot_be_repeated(self) -> None:
        """Note that the code does what no later call can be compared with."""
        if self.following is not None:
            with self.noting_divergence():
                raise self.following.fail("uses autograd functions or checkpoints")
        if self.recording is not None:
            self.recording.is_fit = False

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
        args, kwargs = tuple(args), kwargs or {}  # torch sometimes hands over a list
        if self._paused or not self._open:
            return func(*args, **kwargs)
        if wraps_for_vmap(func) or not self.listens() or _runs_users_code(func, types):
            self.cannot_be_repeated()
            return func(*args, **kwargs)
        self.before_call()
        if self.following is not None:
            self._note_modes()
            return self._followed(self.following, func, args, kwargs)
        used = list(nested_tensors((args, kwargs)))
        with torch_functions_off():
            versions = [_version(tensor) for tensor in used]
        result = func(*args, **kwargs)
        with torch_functions_off():
            written = [tensor for tensor, was in zip(used, versions, strict=True) if _version(tensor) != was]
            handed_on = self.handed_on(func, result, used, written)
            made = list(nested_tensors(handed_on))
            if made or written or is_mark(func) or is_check(func):
                same = {self.numbers.new(handed_on): self.numbers.of(result)} if handed_on is not result else {}
                self._note_call(func, (args, kwargs), used, made, written, same)
                if self.recording is not None:
                    self._note_result(self.recording, handed_on)
        return handed_on

    def _followed(self, following: Follower, func: Any, args: Any, kwargs: Any) -> Any:
        if self.diverged is not None:
            raise self.diverged
        try:
            return following.function(func, args, kwargs, self)
        except DivergedError as error:
            self.diverged = error
            raise

    def _note_result(self, recording: RecordedCall, result: Any) -> None:
        """Note what a function has returned, for calls that are like the one that is recorded."""
        at = len(self._events) - 1
        recording.results[at] = Template.of(
            result, lambda leaf: TensorNumber(self.numbers.of(leaf)) if isinstance(leaf, Tensor) else leaf
        )
        recording.floats[at], recording.ambient[at] = tuple(self.floats), ambient_modes()
        recording.is_fit = recording.is_fit and not self._is_opaque

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
        self.floats.clear()
        self._is_opaque = False
        frozen = self.frozen(args)
        known = {id(tensor) for tensor in used}
        if used and "dropout" in getattr(func, "__name__", ""):
            for tensor in made:
                self.numbers.share(tensor, used[0])  # it may return its argument itself, which a trace does not show
        numbers = tuple(self.numbers.of(t) if id(t) in known else self.numbers.new(t) for t in made)
        storages = {self.numbers.of(tensor): self.numbers.storage(tensor) for tensor in (*used, *made)}
        self._note_modes()
        self._events.append(
            Called(
                func,
                frozen,
                numbers,
                tuple(self.numbers.of(tensor) for tensor in written),
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

    def flat(self, value: Any, *, holders: bool = False) -> Any:
        leaves, structure = flatten(value, holders=holders)
        return tuple(structure.paths()), tuple(map(self.frozen, leaves))

    def frozen(self, value: Any) -> Any:
        """Return a value of an argument in a form that can be kept and compared."""
        if isinstance(value, Tensor):
            return self.numbers.named((self.following or self.numbers).of(value))
        if isinstance(value, SYMBOLIC):
            return SizeExpression(value.node.expr)
        if type(value) is float:
            self.floats.append(value)
        convert = _CONVERSIONS.get(type(value))
        if convert is not None:
            return convert(value, self.frozen)
        if isinstance(value, torch.Generator):
            self._note("a torch.Generator, whose state a trace does not follow")
        if isinstance(value, nn.Module):
            path = self._paths.get(id(vars(value)))
            if path is not None:
                return ("module", path if self.following is None else self.following.module_path(path))
        if isinstance(value, tuple | list):
            return _CONVERSIONS[tuple if isinstance(value, tuple) else list](value, self.frozen)
        if isinstance(value, PLAIN_TYPES):
            return (type(value).__name__, repr(value))
        self._is_opaque = True
        if isinstance(value, nn.Module):
            return ("module", type(value).__name__)
        if isinstance(value, types.FunctionType):  # one that is defined in a forward is another object in every call
            return ("function", value.__qualname__)
        if type(value).__module__ == "numpy":
            return ("numpy", repr(getattr(value, "tolist", lambda: value)()))
        return ("object", type(value).__name__)


class TraceHistory(HistoryRecorder):
    """Recorder of the history of a trace. What is traced into a graph of its own, as a branch of torch.cond, is not."""

    def __init__(self, paths: Mapping[int, str], listens: Callable[[], bool], repeats: Repeats | None) -> None:
        super().__init__(paths, repeats=repeats)
        self.listens = listens  # type: ignore[method-assign]


_CONVERSIONS: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {
    tuple: lambda value, frozen: tuple(map(frozen, value)),
    list: lambda value, frozen: ("list", *map(frozen, value)),  # as an index it means something else
    dict: lambda value, frozen: tuple((repr(key), frozen(item)) for key, item in value.items()),
    slice: lambda value, frozen: ("slice", frozen(value.start), frozen(value.stop), frozen(value.step)),
    bool: lambda value, frozen: ("bool", value),
    int: lambda value, frozen: value,
    float: lambda value, frozen: ("float", f"{value:.15g}"),
    str: lambda value, frozen: ("str", value),
    type(None): lambda value, frozen: None,
}


def _runs_users_code(func: Any, kinds: Sequence[type]) -> bool:
    """Return True if code of the user's may run below a torch function, where nothing is compared."""
    functions = (inspect.unwrap(func), *(getattr(kind, "__torch_function__", None) for kind in kinds))
    codes = (getattr(each, "__code__", None) for each in functions)
    return any(code is not None and is_users_code(code.co_filename) for code in codes)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, SYMBOLIC) else int(size)


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
