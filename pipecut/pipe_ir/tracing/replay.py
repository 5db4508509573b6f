"""Runs of a model after its trace, on tensors without memory: what a forward does when it runs again.

They run in a row on one copy, so that what one leaves behind shows in the next: the first with other random numbers,
the second in other sizes, the third without gradients. A run without a tracer and with plain numbers for sizes takes a
small part of the time of torch.export.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from ...torch_internals import (
    HOOK_DICTS,
    FakeTensorMode,
    buffers_of,
    default_generators,
    fake_mode_with_numbers,
    intercepted_checkpoints,
    intercepted_functions,
    parameters_of,
    reported_hooks,
    seen_as_export,
)
from ..copies import quiet_subclass, stand_in_for_meta
from ..inputs import Example
from ..sizes.faults import other_sizes
from ..structure import map_leaves
from ..surroundings import Generator, Place
from ..traced import TracedModel
from ..untouched import Watch
from .events import Effect, History, KeptValue, Numbers, line_text, new_buffers, other_path
from .history import HistoryRecorder, innermost_line
from .outside_state import NUMBER, StateWatch, changed_places, uses_in, watched_sources, without_watch
from .records import reason_of
from .repeats import Repeats
from .run import is_without_memory, kept_random_numbers, own_code


@dataclass(frozen=True)
class Replay:
    """One more run of a model: its history, `how` it differed from the traced run in words, and its gradient mode.

    `error` is what the forward raised, if it did; the history then ends there.
    """

    history: History
    how: str
    with_gradients: bool = True
    error: str | None = None


class Replays(NamedTuple):
    """Runs of a model again. `effects` are those of its forwards on Python's state, `kept` what they change there."""

    runs: tuple[Replay, ...]
    effects: tuple[Effect, ...] = ()
    kept: tuple[KeptValue, ...] = ()


class StandInInputs:
    """The part of a Recorder that modules which stay as they are need, in a run without a tracer."""

    listens = True
    depth = (0, 0)

    def __init__(self) -> None:
        self.input_values: Sequence[Tensor] = ()

    def abandon(self, depth: tuple[int, int]) -> None:
        """Do nothing: there are no open spans."""

    def check_constants(self) -> None:
        """Do nothing: there is no trace to check."""

    def restart(self) -> None:
        """Begin a run; whoever counts calls begins anew."""


class Replayer:
    """Runs `runner`, a copy of a model in the mode and with the hooks of its trace, again."""

    def __init__(
        self,
        runner: nn.Module,
        example: Example,
        traced: TracedModel,
        inputs: StandInInputs,
        watch: Watch,
        device: torch.device | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        self._repeats = repeats
        self.runner, self.example, self.traced, self.inputs = runner, example, traced, inputs
        self._outside = watch
        self.mode = fake_mode_with_numbers()
        self.numbers = Numbers()
        self.paths = {id(vars(module)): path for path, module in runner.named_modules()}
        self._recorder: _ReplayRecorder
        assert traced.history is not None
        self.sizes = traced.history.sizes
        self._device = torch.device("cpu") if is_without_memory(traced.model) else device
        if self._device is None:
            _replace_state(runner, self.mode)
        else:
            stand_in_for_meta(runner, (), self.mode, device=self._device)
        for module in runner.modules():
            self._watch(module)
        # A snapshot apart, which ends with the runs: what it has of the copy are tensors that must not outlive them.
        self.surroundings = watch.surroundings.with_more(vars(module) for module in runner.modules())

    def run(self, apart: bool, originals: Mapping[int, Any]) -> Replays:
        """Return the runs, one after the other; those are left out in which the model raises for another reason.

        `originals` has the user's objects, by the ids of their copies.
        """
        with kept_random_numbers(()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = partial(self._run, self.sizes, 1, "with other random numbers", boundaries=True)
            with watched_sources(self.surroundings.places(), self._note_use):
                first = run()
            uses = uses_in(first.history, self._recorder.path, first.error)
            if first.error is not None:  # perhaps a number that is none went where nothing else can
                first = run()
                if first.error is not None:
                    return Replays((first,))
            runs = (first, *(self._apart() if apart else self._together()))
            if apart:
                return Replays(runs)
            places = changed_places(self.surroundings, self.runner)
            more, kept = self._outside_state(places, originals) if places else ((), ())
            return Replays(runs, (*uses, *more), kept)

    def _note_use(self, what: str) -> str:
        return self._recorder.note_use(what)

    def _outside_state(
        self, places: Collection[Place], originals: Mapping[int, Any]
    ) -> tuple[tuple[Effect, ...], tuple[KeptValue, ...]]:
        """Find who changes some places, and who decides by those that change in every run: in three runs in a row."""
        self.surroundings.restore()
        watch = StateWatch(places)
        self._run(self.sizes, 1, "from the begin", watch=watch)
        watch.begin_again()
        before = self._run(self.sizes, 1, "a second time in a row", watch=watch)
        watch.replace_numbers(self._note_use)
        with contextlib.redirect_stdout(io.StringIO()):  # the numbers that it prints are others
            after = self._run(self.sizes, 1, "with watched numbers", watch=watch)
        effects = [*uses_in(after.history, self._recorder.path, after.error)]
        if not effects and (path := other_path(before.history, after.history)) is not None:
            effects.append(Effect(path, f"{NUMBER}, as a part of a text", is_use=True))
        effects += [Effect(path, "an array that it writes to", is_use=True) for path in watch.arrays_changed()]
        return tuple(effects), tuple(watch.kept(self.surroundings, originals, self.paths))

    def _together(self) -> Iterator[Replay]:
        """Yield one run that differs in several respects, or several runs if it fails."""
        for shapes, text in other_sizes(self.traced, self.sizes):
            found = self._run(shapes, 2, f"in other sizes ({text}) under torch.no_grad()", with_gradients=False)
            if found.error is None:
                yield found
                return
            break
        yield from self._apart()

    def _apart(self) -> Iterator[Replay]:
        yield self._run(self.sizes, 2, "a second time in a row")
        for shapes, text in other_sizes(self.traced, self.sizes):
            resized = self._run(shapes, 3, f"in other sizes ({text})")
            if resized.error is None:
                yield resized
                break
        without = self._run(self.sizes, 4, "under torch.no_grad()", with_gradients=False)
        if without.error is None:
            yield without

    def _run(
        self,
        shapes: Sequence[Sequence[int]],
        seed: int,
        how: str,
        *,
        with_gradients: bool = True,
        boundaries: bool = False,
        watch: StateWatch | None = None,
    ) -> Replay:
        tensors = self._inputs(shapes)
        self.inputs.input_values = tensors
        self.inputs.restart()
        # Of torch's own kind no operation draws here; one among the arguments of a function is noted.
        generators = [each for each in self.surroundings.generators if each.kind != "torch.Generator"]
        # With watched numbers in the place of plain ones, every call is computed.
        repeats = self._repeats if watch is None else None
        made_of = (self.paths, self.numbers, seed, boundaries, generators, watch, repeats)
        recorder = self._recorder = _ReplayRecorder(*made_of)
        args, kwargs = self.example.call_with(tuple(tensors))
        error: str | None = None
        with _surroundings(self.mode, with_gradients, recorder.cannot_be_repeated), reported_hooks(self._on_hook):
            recorder.begin(self.runner, tensors)
            try:
                with own_code(self._outside, recorder, lambda line: None):
                    self.runner(*args, **kwargs)
            except Exception as raised:  # the model's own, which is reported or shows that a size is not for it
                error = reason_of(raised)  # the error itself would keep alive what the run made
            recorder.raise_if_diverged()
        return Replay(recorder.finish(), how, with_gradients, error)

    def _inputs(self, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        made = []
        for tensor, shape in zip(self.example.tensors, shapes, strict=True):
            own = tuple(tensor.shape) == tuple(shape) and tensor.layout == torch.strided
            options: Any = {"dtype": tensor.dtype, "device": self._device or tensor.device}
            with self.mode:
                fake = torch.empty_strided(shape, tensor.stride(), **options) if own else torch.empty(shape, **options)
            made.append(fake.requires_grad_(tensor.requires_grad))
        return made

    def _watch(self, module: nn.Module) -> None:
        opened: list[tuple[tuple[int, int], dict[str, Any]]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            opened.append((self._recorder.enter(module, args, kwargs), dict(buffers_of(module))))

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
            position, buffers = opened.pop()
            if self._recorder.following is not None:
                return self._recorder.leave_followed(result, new_buffers(module, buffers))
            with self._recorder.paused():
                output = map_leaves(lambda leaf: self._recorder.own_result(leaf, position), result)
            self._recorder.leave(result, output, new_buffers(module, buffers))
            return output

        _watch_calls(module, enter, leave)

    def _on_hook(self, hooks: Any) -> None:
        # Hooks of modules are Python state like any other; those of tensors act in the backward.
        dicts = (vars(module).get(name) for module in self.runner.modules() for name in HOOK_DICTS)
        if not any(hooks is own for own in dicts):
            self._recorder.note_effect("a hook on a tensor or on its grad_fn")


class _ReplayRecorder(HistoryRecorder):
    """Recorder of a run without a tracer, which also sees what the forward does to random number generators.

    On tensors without memory no operation draws a number. torch's generators are therefore given a new seed before
    each call: one with any other seed was seeded or set by the forward.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        numbers: Numbers,
        seed: int,
        boundaries: bool,
        generators: Sequence[Generator] = (),
        watch: StateWatch | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        super().__init__(paths, numbers, repeats)
        self._watch, self._own_generators = watch, generators
        self._generators, self._seed = default_generators(), seed * 10_000_019
        self._numpy: Any = sys.modules.get("numpy")
        random.seed(seed)
        if self._numpy is not None:
            self._numpy.random.seed(seed)
        self._boundaries = boundaries
        self._drawn = self._states()
        self._next_seed()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[int, int]:
        """Note the begin of a module's call; return the numbers of events and of tensors so far."""
        self._look_at_generators()
        return super().enter(module, args, kwargs)

    def leave(self, result: Any, handed_on: Any, buffers: Mapping[str, Tensor]) -> None:
        """Note the end of a module's call."""
        self._look_at_generators()
        super().leave(result, handed_on, buffers)

    def leave_followed(self, output: Any, buffers: Mapping[str, Tensor]) -> Any:
        """Note the end of a module's call that is like an earlier one."""
        self._look_at_generators()
        return super().leave_followed(output, buffers)

    def own_result(self, leaf: Any, since: tuple[int, int]) -> Any:
        """Return a tensor that a call made or wrote to, an alias of any other: as the trace has it."""
        if not isinstance(leaf, Tensor):
            return leaf
        events, tensors = since
        number = self.numbers.of(leaf)
        made = number >= tensors or any(number in written for written in self._written_since(events))
        return leaf if made else torch.ops.aten.alias.default(leaf)

    def handed_on(self, func: Any, result: Any, used: Sequence[Tensor], written: Sequence[Tensor]) -> Any:
        """Return an alias of an argument that a function hands back unchanged (`x.to(x.dtype)`), to tell them apart."""
        is_argument = isinstance(result, Tensor) and any(result is tensor for tensor in used)
        if not is_argument or written or getattr(func, "__name__", "").endswith("_"):
            return result
        return torch.ops.aten.alias.default(result)

    def before_call(self) -> None:
        self._look_at_seeds()

    @property
    def path(self) -> str:
        """The innermost module that is running."""
        return self._open[-1] if self._open else ""

    def note_use(self, what: str) -> str:
        """Note that the innermost call uses a value from outside, and return the path of its module."""
        self._effects.setdefault(Effect(self.path, f"{what}{_here()}", is_use=True))
        return self.path

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._watch is not None or self._boundaries:
            args = [without_watch(each) for each in args]
            kwargs = {name: without_watch(each) for name, each in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, kwargs)

    def _look_at_generators(self) -> None:
        if self._watch is not None:
            self._watch.look(self.path)
        self._look_at_seeds()
        states = self._states()
        for key, state in states.items():
            if state != self._drawn[key]:
                self.note_effect(key[0])
        self._drawn = states

    def _look_at_seeds(self) -> None:
        if any(generator.initial_seed() != self._seed for generator in self._generators):
            self.note_effect("a seed or a state for torch's random numbers (manual_seed, set_rng_state, fork_rng)")
        self._next_seed()

    def _next_seed(self) -> None:
        self._seed += 1
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def _states(self) -> dict[tuple[str, int], Any]:
        """Return the states of the generators that are not torch's, by their names in words and a number."""
        if not self._boundaries:
            return {}
        states: dict[tuple[str, int], Any] = {("random numbers of Python (the module random)", 0): random.getstate()}
        if self._numpy is not None:
            kind, keys, *rest = self._numpy.random.get_state()
            states["random numbers of numpy (numpy.random)", 0] = (kind, keys.tobytes(), *rest)
        for number, generator in enumerate(self._own_generators):
            states[f"random numbers of a {generator.kind} of its own", number] = pickle.dumps(generator.read())
        return states


def _here() -> str:
    line = innermost_line()
    return f" at {line_text(line)}" if line is not None else ""


@contextlib.contextmanager
def _surroundings(mode: FakeTensorMode, with_gradients: bool, on_region: Callable[[], None]) -> Iterator[None]:
    """Let code run as in a trace, without a tracer; `on_region` is called at autograd functions and checkpoints."""
    with (
        torch.set_grad_enabled(with_gradients),
        torch.compiler.set_stance("force_eager"),
        seen_as_export(),
        intercepted_functions(partial(_on_function, on_region)),
        intercepted_checkpoints(partial(_on_checkpoint, on_region)),
        mode,
    ):
        yield


def _on_function(on_region: Callable[[], None], cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    on_region()
    if cls is not torch_checkpoint.CheckpointFunction:
        return run(*args, **kwargs)
    function, _, *inputs = args
    carries = any(isinstance(item, Tensor) and item.requires_grad for item in inputs)
    with torch.set_grad_enabled(carries and torch.is_grad_enabled()):
        return function(*inputs)


def _on_checkpoint(on_region: Callable[[], None], args: Any, options: Any) -> Iterator[None]:
    on_region()
    yield


def _watch_calls(module: nn.Module, enter: Callable[..., None], leave: Callable[..., Any]) -> None:
    """Call `enter` and `leave` at both ends of a module's calls, inside of a `__call__` of its class's own."""
    cls = type(module)
    if cls.__call__ is nn.Module.__call__:
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)
        return

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        enter(module, args, kwargs)
        return leave(module, args, kwargs, cls.__call__(module, *args, **kwargs))

    module.__class__ = quiet_subclass(cls, {"__call__": __call__})


def _replace_state(model: nn.Module, mode: FakeTensorMode) -> None:
    for module in model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = mode.from_tensor(tensor, static_shapes=True)  # type: ignore[assignment]
