"""One run of a model under torch.export, recorded and frozen as a TracedModel."""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import PipeError, TraceError
from ...torch_internals import backward_hooks, forward_hooks, sizes_from_data_known, sizes_of_one_traced
from ..copies import clone, stand_in_for_meta
from ..inputs import Example, bind_inputs, enlarged, objects_kept, read_example, sizes_of_one, with_fixed
from ..sizes.dynamic import Dynamic, DynamicDims
from ..traced import Opaque, Template, TracedModel
from ..untouched import Watch, run_untouched
from .branches import AnsweredBranches
from .freeze import freeze
from .history import HistoryRecorder
from .recorder import Recorder
from .records import UntraceableError, place_of
from .repeats import DivergedError, Repeats

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class _TraceNoopContiguous(TorchFunctionMode):
    """Sends `contiguous()` through the dispatcher, so that every trace has it.

    Of a tensor that is contiguous, torch returns the tensor itself. In another mode or size it may not be contiguous,
    and two traces of one code would not match.

    >>> x = torch.ones(2)
    >>> with _TraceNoopContiguous():
    ...     x.contiguous() is not None
    True
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.contiguous:
            # Of an alias: where there is nothing to do the result is the argument itself, and a tracer would from then
            # on take the argument for something that this call has made.
            alias = torch.ops.aten.alias.default(args[0])
            return torch.ops.aten.contiguous.default(alias, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _ForwardError(Exception):
    """Raised when the model's own code fails; torch cannot attach its graph, which it would print."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    def __setattr__(self, name: str, value: object) -> None:
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


class _TraceFinished(BaseException):
    """Raised when all of the model has been traced: what torch.export does to the graph afterwards is of no use here.

    It wraps regions, renames values and prints code, which takes a quarter of its time.
    """


@contextlib.contextmanager
def own_code(watch: Watch, history: HistoryRecorder, on_answer: Callable[[str], None]) -> Iterator[None]:
    """Run the model's own code, and nothing else: what torch does around it goes through no mode."""
    branches = AnsweredBranches(on_answer, history.listens)  # the first to see a function: the history gets its checks
    with watch, sizes_from_data_known(), _TraceNoopContiguous(), history, branches, branches.of_numbers():
        yield
        branches.raise_refused()


class _Entry(nn.Module):
    """Module that torch.export traces: it takes tensors only, so that any structure passes in and out."""

    def __init__(self, model: nn.Module, example: Example, recorder: Recorder, watch: Watch) -> None:
        super().__init__()
        self.model = model
        self._watch = watch
        self._example = example
        self._recorder = recorder

    def forward(self, *tensors: torch.Tensor) -> NoReturn:
        self._recorder.note_inputs(tensors)
        args, kwargs = self._example.call_with(tensors)
        try:
            with own_code(self._watch, self._recorder.history, self._recorder.note_draw):
                output = self.model(*args, **kwargs)
        except Exception as error:
            raise _ForwardError(error) from error
        self._recorder.note_output(output)
        self._watch.stop()
        raise _TraceFinished


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    live_hooks: Iterable[str] = (),
    training: bool | None = None,
    dynamic: Dynamic | None = None,
    prepare: Callable[[nn.Module, Recorder], None] | None = None,
    device: torch.device | None = None,
    *,
    enlarges: bool = True,
    repeats: Repeats | None = None,
) -> TracedModel:
    """Trace one run of `model` with torch.export (non-strict). The model itself is not touched: a copy runs.

    Forward hooks do not run during the trace, except those of the modules at `live_hooks`: a module that is not
    cut keeps its hooks, and they run whenever it does. `training` puts all modules of the copy in that mode.
    `dynamic` names the sizes that are to be symbolic, besides dim 0 of all inputs. `prepare` gets the copy before it
    runs, and may change how its modules are called. With a `device` all of the model is traced as if it were there:
    parts of it may have been moved. An example of one row is traced with several, unless `enlarges` is False; what the
    code decided then may rule out the example, as `conditions` say. Calls of modules that look alike by `repeats` are
    compared with each other, and computed once.
    """
    example = read_example(model, args, kwargs, dynamic)
    live_hooks = set(live_hooks)
    small = sizes_of_one(example) if prepare is None else []
    if small:
        # What the model decides about a size of 1 may rule it out, or all others: the first trace that holds is taken.
        for is_enlarged in (True, False) if enlarges else (False,):
            tensors = enlarged(example, small) if is_enlarged else example.tensors
            try:
                run = partial(_run, model, example, tensors, live_hooks, training, None, device, repeats)
                traced = without_diverged(repeats, partial(run_untouched, model, run))
                # Which conditions of a trace with larger sizes count is known when it is cut.
                conditions = () if is_enlarged else traced.conditions
                bind_inputs(replace(traced.call, conditions=conditions), args, kwargs or {})
            except PipeError:
                continue
            return traced
        example = with_fixed(example, small)
    run = partial(_run, model, example, example.tensors, live_hooks, training, prepare, device, repeats)
    return without_diverged(repeats, partial(run_untouched, model, run))


def without_diverged(repeats: Repeats | None, run: Callable[[], _T]) -> _T:
    """Run a model until no call is taken for another that it is unlike: each time one more module is left out."""
    while True:
        try:
            return run()
        except DivergedError as error:
            assert repeats is not None
            _LOG.debug("traced again, in full there: %s", error)
            repeats.leave_out(error.path)


def _run(
    model: nn.Module,
    example: Example,
    tensors: tuple[torch.Tensor, ...],
    live_hooks: set[str],
    training: bool | None,
    prepare: Callable[[nn.Module, Recorder], None] | None,
    device: torch.device | None,
    repeats: Repeats | None,
    watch: Watch,
) -> TracedModel:
    """Trace a copy of a model once, on tensors in place of those of the example."""
    runner = clone(model)
    if training is not None:
        runner.train(training)
    silence_hooks(runner, live_hooks)
    recorder = Recorder(runner, repeats)
    if prepare is not None:
        prepare(runner, recorder)
    entry = _Entry(runner, example, recorder, watch)
    if is_without_memory(model):
        tensors = stand_in_for_meta(runner, tensors)
    elif device is not None and any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        tensors = stand_in_for_meta(runner, tensors, device=device)
    try:
        try:
            with objects_kept(example):
                _export(entry, _distinct(tensors), example.dynamic)
        finally:
            recorder.history.raise_if_diverged()
        _check_output(model, recorder.output)
        return freeze(model, example, recorder, model.training if training is None else training)
    finally:
        recorder.forget()


def _distinct(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the tensors as one object each: torch.export takes a tensor that is passed twice for one input."""
    once: dict[int, torch.Tensor] = {}
    return tuple(
        once.setdefault(id(tensor), tensor)
        if id(tensor) not in once
        else tensor.detach().requires_grad_(tensor.requires_grad)
        for tensor in tensors
    )


def _check_output(model: nn.Module, output: Template) -> None:
    unknown = sorted({leaf.type_name for leaf in output.leaves if isinstance(leaf, Opaque)})
    if unknown:
        raise TraceError(
            f"{type(model).__name__} returns a {' and a '.join(unknown)}, which cannot be taken apart and put together "
            "again; return tensors in tuples, lists, dicts or dataclasses, or register the type with "
            "torch.utils._pytree.register_pytree_node"
        )


def silence_hooks(model: nn.Module, live: set[str]) -> None:
    """Take the user's hooks from a copy, except the forward hooks of the modules at `live`."""
    for path, module in model.named_modules():
        for hooks in backward_hooks(module):
            hooks.clear()
        if path in live:
            continue
        for hooks in forward_hooks(module):
            for key in [key for key, hook in hooks.items() if not _is_part_of_the_forward(hook)]:
                del hooks[key]


def has_forward_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks of the user's."""
    return any(not _is_part_of_the_forward(hook) for hooks in forward_hooks(module) for hook in hooks.values())


def _is_part_of_the_forward(hook: object) -> bool:
    """Return True for hooks of torch's weight_norm, spectral_norm and pruning: they compute the weights."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.startswith("torch.nn.utils")


def is_without_memory(model: nn.Module) -> bool:
    """Return True if parameters or buffers of a model are on the meta device."""
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} >= {"meta"}


def _export(entry: _Entry, tensors: tuple[torch.Tensor, ...], asked: DynamicDims) -> None:
    places = asked.symbolic([tensor.shape for tensor in tensors])
    dynamic = tuple(
        {dim: torch.export.Dim.AUTO for dim in range(tensor.dim()) if (nth, dim) in places}
        for nth, tensor in enumerate(tensors)
    )
    try:
        with (
            warnings.catch_warnings(),
            sizes_of_one_traced(),  # what the code decides about a size of 1 becomes a condition of the trace
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            _noted_draws(entry._recorder.note_draw),
            entry._recorder.watch(),
        ):
            # What the forward assigns to itself, it assigns to a copy.
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
            torch.export.export(entry, tensors, dynamic_shapes={"tensors": dynamic}, strict=False)
    except _TraceFinished:
        return
    except _ForwardError as failed:
        raise TraceError(_explain(entry.model, failed.error)) from failed.error
    except Exception as error:
        raise TraceError(_explain(entry.model, error)) from error


@contextlib.contextmanager
def _noted_draws(note: Callable[[str], None]) -> Iterator[None]:
    """Note that the block has drawn from the random numbers of Python or numpy."""
    before = _generator_states()
    try:
        yield
    finally:
        for name, state in _generator_states().items():
            if before.get(name, state) != state:
                note(f"those of {name}")


def _generator_states() -> dict[str, bytes]:
    numpy: Any = sys.modules.get("numpy")
    states = {"Python's random": random.getstate()}
    if numpy is not None:
        states["numpy.random"] = numpy.random.get_state()
    return {name: pickle.dumps(state) for name, state in states.items()}


def _explain(model: nn.Module, error: Exception) -> str:
    place = place_of(error)
    where = f"\n  at {place}" if place else ""
    reason = str(error).strip().split("\n\n")[0].strip() or type(error).__name__
    remedy = (
        "check that the model runs with these inputs; replace branches on the values of tensors (`if x.sum() > 0`, "
        "`.item()`) by torch.where or torch.cond; turn off features that keep Python state"
    )
    if isinstance(error, UntraceableError):
        remedy = error.remedy
    else:
        reason = f"{type(error).__name__}: {reason}"
    return (
        f"{type(model).__name__} could not be traced with these example inputs.{where}\n"
        f"  reason: {reason}\n  what to try: {remedy}"
    )


@contextlib.contextmanager
def kept_random_numbers(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore random generators after a block: torch's (CPU and devices of these tensors), Python's and numpy's.

    >>> before = torch.get_rng_state()
    >>> with kept_random_numbers([]):
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices}:
            indices = [device.index for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
