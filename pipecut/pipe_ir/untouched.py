"""left_as_it_was: a context for runs of a model's code that must leave nothing behind outside of it.

Weak references to the tensors and symbolic sizes that the block makes tell whether one outlives it. Mostly none does,
and that is all. Otherwise somebody has kept it: what the code could reach is put back as it was before the block, and
if that does not help, the holder is looked for and named.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import TraceError
from ..torch_internals import TorchDispatchMode, stand_ins_reported, storage_id, version_of, without_modes
from .operators import written_arguments
from .surroundings import Surroundings, is_machinery

_T = TypeVar("_T")


def run_untouched(model: nn.Module, run: Callable[[Watch], _T], *, real: bool = False, always: bool = False) -> _T:
    """Call a function that runs the code of a model, as `left_as_it_was` has it: its variables are gone afterwards."""
    with left_as_it_was(model, real=real, always=always) as watch:
        return run(watch)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, *, real: bool = False, always: bool = False) -> Iterator[Watch]:
    """Run the code of a model, or of a copy of it, and leave as it was what the code has outside of the model.

    Afterwards no tensor or symbolic size that was made inside is in a cache, a name of a module, an attribute of a
    class or the like; the values of tensors from before are what they were, and so are the user's random generators.
    With `real` that goes for tensors with memory too, for runs on data. What the block returns must hold none of them.
    With `always` numbers and other plain values outside of the model are put back too, even if no tensor was kept.
    The model's code has to run in the mode that the block gets; with `real` all of the block does. `stop()` is called
    when the model's code has ended, if torch goes on to make tensors of its own; `surroundings` are all that was noted.
    """
    with paused_collector():
        watch = Watch(model, real=real)
        failed = True
        try:
            with contextlib.ExitStack() as modes:
                if real:  # in a trace a dispatch mode would change what torch.export sees: x.data would be an operation
                    modes.enter_context(watch.writes)
                    modes.enter_context(watch)
                modes.enter_context(stand_ins_reported(watch.note_made))
                yield watch
            failed = False
        finally:
            watch.clean(failed=failed, always=always)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector: what is made meanwhile stays young, and is found without a look at all the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Watch(TorchFunctionMode):
    """Mode that knows the surroundings of a model before its code runs, and what the code makes."""

    def __init__(self, model: nn.Module, *, real: bool) -> None:
        super().__init__()
        self.writes = _UndoneWrites()
        self._name = type(model).__name__
        self._real = real
        self._notes = True
        self._made: list[weakref.ref[Any]] = []
        self.surroundings = Surroundings()
        self.surroundings.note(vars(module) for module in model.modules())
        self.surroundings.note({type(module): None for module in model.modules()})

    def note_made(self, value: Any) -> None:
        """Note something that must not outlive the block."""
        if self._notes:
            self._made.append(weakref.ref(value))

    def stop(self) -> None:
        """Note no more: the model's code has ended, and torch goes on to make tensors of its own."""
        self._notes = False

    def __torch_function__(
        self, func: Any, kinds: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._real:
            self.writes.note_met(args, kwargs or {})
        self.writes.before_call(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if self._real and isinstance(result, Tensor):
            self.note_made(result)
        return result

    def clean(self, *, failed: bool, always: bool) -> None:
        """Put back what was written or kept; raise if something is kept that cannot be reached."""
        unknown = self.writes.undo()
        self.surroundings.restore_generators()
        if unknown and not failed:
            raise TraceError(
                f"{self._name} has written to a tensor of shape {tuple(unknown[0].shape)} while it was traced, which "
                "is neither an input nor a buffer, in a way that cannot be undone: register it as a buffer"
            )
        if not failed and not always and not self._survives(0):
            return
        self.surroundings.restore()
        torch.clear_autocast_cache()
        # After a failure the frames of its traceback hold tensors too.
        if not failed and self._survives(0) and self._survives(2):
            self._raise_kept()

    def _survives(self, generation: int) -> bool:
        if not any(self._is_ours(ref()) for ref in self._made):  # mostly so where nothing refers to itself
            return False
        gc.collect(generation)
        return any(self._is_ours(ref()) for ref in self._made)

    def _is_ours(self, value: Any) -> bool:
        if value is None:
            return False
        return not self._real or not isinstance(value, Tensor) or self.writes.is_made_inside(value)

    def _raise_kept(self) -> None:
        kept = [value for ref in self._made if self._is_ours(value := ref())]
        holder = _describe_holder(kept)
        if holder is not None:
            raise TraceError(
                f"{self._name} keeps {_words(kept[0])} that its forward makes outside of itself: in {holder}. A trace "
                "must leave nothing there, and this cannot be taken out again. Keep it in an attribute or a buffer of "
                "a module, in a dict or a variable of the Python file of the module's class, or in a "
                "functools.lru_cache"
            )


def _words(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"the size {value}"


# Writes to tensors from before a block. A trace runs on stand-ins, but what the forward does to tensors that are
# neither inputs nor state of the model (a count in a plain attribute, a table of its Python module) torch does for
# real; and a run on the example does everything for real.

# Functions through which the memory of a tensor gets out of torch's sight.
_WAYS_OUT = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage, Tensor.data_ptr})


def _may_write(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True for a function of torch that may write to its first argument, by the names that torch gives them.

    >>> [_may_write(func, {}) for func in (Tensor.add_, Tensor.__iadd__, Tensor.__setitem__, Tensor.add, Tensor.numpy)]
    [True, True, True, False, True]
    """
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith(("__i", "__set")))
    return in_place or func in _WAYS_OUT or kwargs.get("out") is not None


class _UndoneWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that keeps a copy of each tensor from before it that is about to be written to.

    >>> count = torch.zeros(2)
    >>> writes = _UndoneWrites()
    >>> with writes:
    ...     _ = count.add_(1).mul_(4)
    >>> writes.undo(), count
    ([], tensor([0., 0.]))
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()  # memory of tensors that were made inside
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor from before and its copy, by their memory
        self._met: dict[int, tuple[Tensor, int]] = {}  # tensors that functions were called with, and their versions

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        for tensor in _real_tensors(list(written_arguments(func, args, named))):
            self.keep(tensor)
        result = func(*args, **named)
        made = {storage_id(tensor) for tensor in _real_tensors(result)}
        if made:
            self._made |= made.difference(map(storage_id, _real_tensors([*args, *named.values()])))
        return result

    def note_met(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the tensors that a function of torch is called with, where this mode does not see its operators."""
        for tensor in _real_tensors([*args, *kwargs.values()]):
            if id(tensor) not in self._met:
                self._met[id(tensor)] = tensor, _version(tensor)

    def before_call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the tensor that a function of torch may write to."""
        if _may_write(func, kwargs):
            for tensor in _real_tensors([*args[:1], kwargs.get("out")]):
                self.keep(tensor)

    def is_made_inside(self, tensor: Tensor) -> bool:
        """Return True for a tensor whose memory was not there before."""
        return any(storage_id(real) in self._made for real in _real_tensors(tensor))

    def keep(self, tensor: Tensor) -> None:
        """Keep a copy of the memory of a tensor, unless there is one or the tensor is new."""
        memory = storage_id(tensor)
        if memory in self._made or memory in self._copies:
            return
        with without_modes(), torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._copies[memory] = whole, whole.clone()

    def undo(self) -> list[Tensor]:
        """Put back what was in the tensors; return those that were written to and of which there is no copy."""
        for whole, copy in self._copies.values():
            if not torch.equal(whole, copy):
                whole.copy_(copy)
        written = [tensor for tensor, version in self._met.values() if _version(tensor) != version]
        return [tensor for tensor in written if storage_id(tensor) not in {*self._copies, *self._made}]


def _has_memory(tensor: Tensor) -> bool:
    try:
        storage_id(tensor)
    except NotImplementedError:  # a wrapper of torch.func: what is inside comes by on its own
        return False
    return True


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _real_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory in the arguments or the result of an operator."""
    if type(value) in (Tensor, nn.Parameter):
        if value.layout == torch.strided and value.device.type != "meta" and _has_memory(value):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _real_tensors(item)


# The search for who holds an object, upwards from it, among all that Python's garbage collector knows.

_LEVELS = 8  # of containers around an object
_WIDTH = 50  # objects on one level: each look at all that is alive asks for every one of them
_LruCache: Any = type(functools.lru_cache(len))
_Held = dict[int, tuple[Any, int | None]]  # objects by id, each with the id of what it holds


def _describe_holder(values: Sequence[Any]) -> str | None:
    """Describe who of the user's holds one of some values; None if nobody but torch does."""
    level = list(values[:_WIDTH])
    held: _Held = {id(value): (value, None) for value in level}
    own = {id(values)}
    for _ in range(_LEVELS):
        own.add(id(level))
        below = level
        above = [holder for holder in gc.get_referrers(*below) if id(holder) not in own and id(holder) not in held]
        level = [holder for holder in above if not _is_of_no_interest(holder)][:_WIDTH]
        _note_what_they_hold(level, below, held)
        root = next((holder for holder in level if _name_of(holder) is not None), None)
        if root is not None:
            return f"{_name_of(root)}{_way_down(root, held)}"
        if not level:
            unnamed = below[0] if not above and held[id(below[0])][1] is not None else None
            return None if unnamed is None else f"a {type(unnamed).__name__}{_way_down(unnamed, held)}"
    return None


def _note_what_they_hold(holders: Sequence[Any], below: Sequence[Any], held: _Held) -> None:
    known = set(map(id, below))
    for holder in holders:
        held[id(holder)] = holder, next(id(part) for part in gc.get_referents(holder) if id(part) in known)


def _is_of_no_interest(holder: Any) -> bool:
    """Return True for what is torch's or pipecut's own: their frames, functions and objects."""
    if isinstance(holder, types.FrameType):
        return is_machinery(holder.f_globals.get("__name__"))
    if isinstance(holder, types.FunctionType | type | _LruCache):
        return is_machinery(holder.__module__)
    if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
        return is_machinery(holder["__name__"])
    return type(holder).__module__.partition(".")[0] in ("torch", "pipecut") and not isinstance(holder, nn.Module)


def _name_of(holder: Any) -> str | None:
    """Return the name of something at which the search ends."""
    if isinstance(holder, dict):
        module = sys.modules.get(str(holder.get("__name__")))
        return module.__name__ if module is not None and vars(module) is holder else None
    if isinstance(holder, types.FrameType):
        return f"local variables of {holder.f_code.co_qualname}()"
    if isinstance(holder, type):
        return holder.__qualname__.rpartition("<locals>.")[2]
    if isinstance(holder, _LruCache):
        return f"the cache of {holder.__wrapped__.__qualname__}()"
    if isinstance(holder, types.FunctionType):
        return f"variables and defaults of {holder.__qualname__}()"
    return None


def _way_down(root: Any, held: _Held) -> str:
    """Return the way from a root to the value, as one would write it in Python as far as that is known."""
    holder, text = root, ""
    while (below := held[id(holder)][1]) is not None:
        text += _step(holder, below)
        holder = held[below][0]
    return text


def _step(holder: Any, below: int) -> str:
    if isinstance(holder, dict):
        named = (
            "__name__" in holder
            or "__module__" in holder
            or any(vars(owner) is holder for owner in gc.get_referrers(holder) if hasattr(owner, "__dict__"))
        )
        key = next((key for key, value in holder.items() if id(value) == below), None)
        return "" if key is None else f".{key}" if named else f"[{key!r}]"
    if isinstance(holder, list | tuple):
        return f"[{next((at for at, value in enumerate(holder) if id(value) == below), '...')}]"
    return ""
