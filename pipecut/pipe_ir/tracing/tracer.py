"""ModelTracer: traces with torch.export alone, or around the modules that it cannot trace."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from ...errors import ExampleError, InputError, SplitError, TraceError, warn
from ..copies import clone, clone_with_originals
from ..eager import EagerModules, HiddenTieError, Observations, run_on_example
from ..inputs import Example, read_example
from ..sizes.dynamic import AUTO, Dynamic
from ..structure import map_leaves
from ..traced import Fallback, TracedModel
from ..untouched import Watch, run_untouched
from .recorder import Recorder
from .records import UntraceableError, place_of, reason_of, why_and_where
from .repeats import Repeats
from .replay import Replayer, Replays, StandInInputs
from .run import has_forward_hooks, is_without_memory, kept_random_numbers, silence_hooks, trace, without_diverged

_REMEDIES = {
    False: (
        "what to do: this is in the model's own forward, between its modules. Move the lines that decide by values of "
        "tensors, or call what cannot be traced, into a module of their own: it then stays as it is, and the model can "
        "be cut before and after it. Or write x.item() in place of int(x) and float(x), and torch.where or torch.cond "
        "in place of branches on values"
    ),
    True: (
        "what to do: pass what the modules share as arguments and results, or put the modules that share it into one "
        "module, which then stays as it is"
    ),
}

TracerName = Literal["auto", "export", "fx"]


def check_tracer_name(tracer: object) -> None:
    """Raise on an unknown tracer name."""
    if tracer not in get_args(TracerName):
        names = ", ".join(map(repr, get_args(TracerName)))
        raise InputError(f"tracer must be one of {names}, got {tracer!r}")


class ModelTracer:
    """Tracer of one model with one example, as often as needed; it remembers the untraceable modules."""

    def __init__(
        self,
        tracer: TracerName,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        dynamic: Dynamic | None = None,
        training: bool | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.tracer, self.model = tracer, model
        self.args, self.kwargs, self.dynamic = args, kwargs, dynamic
        self._training, self._device = training, device
        self.fallbacks: dict[str, Fallback] = {}
        self._needed_hooks: set[str] = set()
        self._left_behind: set[str] = set()
        self._export_failure: TraceError | None = None
        self.enlarges = True  # False: an example of one row is traced as it is
        self._observed: Observations | None = None
        self._computes_repeats = False  # True: calls of equal modules are all computed, to compare

    @functools.cached_property
    def _repeats(self) -> Repeats:
        return Repeats(self.model)

    def trace(self, live_hooks: Iterable[str] = (), training: bool | None = None) -> TracedModel:
        """Trace the model; the arguments are those of `trace`."""
        training = self._training if training is None else training
        live_hooks = {*live_hooks, *self._needed_hooks}
        if self.tracer == "export":
            return self._trace_all(live_hooks, training)
        if self.tracer == "auto" and not self.fallbacks:
            try:
                return self._trace_all(live_hooks, training)
            except TraceError as failure:
                if failure.__cause__ is None:
                    raise  # the trace itself went well: it is the model's result that cannot be used
                self._export_failure = failure
        known = set(self.fallbacks)
        traced = self._around_eager_modules(live_hooks, training)
        if self.tracer == "auto":
            self._warn([fallback for path, fallback in self.fallbacks.items() if path not in known])
        return replace(traced, fallbacks=tuple(self.fallbacks.values()))

    def replays(
        self, traced: TracedModel, live_hooks: Iterable[str] = (), training: bool | None = None, *, apart: bool = False
    ) -> Replays:
        """Run the model again, as it was traced with these arguments, without a tracer.

        With `apart` each run differs from the trace in one respect; otherwise there are fewer of them.
        """
        training = self._training if training is None else training
        repeats = self._repeats if self._observed is None and not self._computes_repeats else None
        run = partial(self._run_again, traced, {*live_hooks, *self._needed_hooks}, training, apart, repeats)
        return without_diverged(repeats, partial(run_untouched, self.model, run, always=True))

    def _run_again(
        self,
        traced: TracedModel,
        live_hooks: set[str],
        training: bool | None,
        apart: bool,
        repeats: Repeats | None,
        watch: Watch,
    ) -> Replays:
        copy, originals = clone_with_originals(self.model)
        if training is not None:
            copy.train(training)
        silence_hooks(copy, live_hooks)
        inputs = StandInInputs()
        if self._observed is not None:
            eager = EagerModules(self._observed, self.fallbacks.keys(), finds=False)
            eager.prepare(copy, inputs)
            inputs.restart = eager.restart  # type: ignore[method-assign]
        example = read_example(self.model, self.args, self.kwargs, self.dynamic)
        return Replayer(copy, example, traced, inputs, watch, self._device, repeats).run(apart, originals)

    def _trace_all(self, live_hooks: set[str], training: bool | None) -> TracedModel:
        """Trace with torch.export alone; if it fails with all sizes symbolic, with those of the example."""
        try:
            return self._trace_with_hooks(live_hooks, training)
        except TraceError as failure:
            if self.dynamic != AUTO or failure.__cause__ is None:
                raise
            self.dynamic = None
            try:
                traced = self._trace_with_hooks(live_hooks, training)
            except TraceError:
                self.dynamic = AUTO
                raise failure from failure.__cause__
            name, why = type(self.model).__name__, why_and_where(failure.__cause__)
            warn(
                f"{name} cannot be traced with dynamic='auto' ({why}). "
                "All sizes but the batch are those of the example: name the ones that change, "
                "dynamic={'input': {1: 'seq'}}"
            )
            return traced

    def for_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, device: torch.device
    ) -> ModelTracer:
        """Return a tracer of the model for another call, in a mode, and as if all of it were on one device."""
        args, kwargs = map_leaves(partial(_example_of, device=device), (args, dict(kwargs)))
        mode = None if self.model.training is training else training
        dynamic = _asked_of(self.dynamic, read_example(self.model, args, kwargs))
        other = ModelTracer(self.tracer, self.model, args, kwargs, dynamic, mode, device)
        other.fallbacks, other._left_behind = dict(self.fallbacks), self._left_behind
        return other

    def _trace_with_hooks(self, live_hooks: set[str], training: bool | None) -> TracedModel:
        """Trace without hooks; with all of them if that fails, for a model may gather its results in hooks."""
        try:
            return self._trace(live_hooks, training)
        except TraceError as failure:
            hooked = {path for path, module in self.model.named_modules() if has_forward_hooks(module)}
            if hooked <= live_hooks:
                raise
            try:
                traced = self._trace(hooked, training)
            except TraceError:
                raise failure from failure.__cause__
            self._needed_hooks = hooked
            return traced

    def _trace(
        self,
        live_hooks: set[str],
        training: bool | None,
        prepare: Callable[[nn.Module, Recorder], None] | None = None,
    ) -> TracedModel:
        with _quiet_tracer() if self.tracer != "export" else contextlib.nullcontext(), kept_random_numbers(()):
            return trace(
                self.model,
                self.args,
                self.kwargs,
                live_hooks,
                training,
                self.dynamic,
                prepare,
                self._device,
                enlarges=self.enlarges,
                repeats=self._repeats if prepare is None and not self._computes_repeats else None,
            )

    def _around_eager_modules(self, live_hooks: set[str], training: bool | None) -> TracedModel:
        """Trace until no other module fails. Each round finds at least one, so that there is an end."""
        observed = self._observed = self._observations(training)
        while True:
            eager = EagerModules(observed, self.fallbacks.keys())
            try:
                traced = self._trace(live_hooks, training, eager.prepare)
            except TraceError as failure:
                if not eager.found or eager.found.keys() <= self.fallbacks.keys():
                    raise self._failed(failure.__cause__ or failure) from (failure.__cause__ or failure)
            else:
                if not eager.found:
                    self._warn_of_what_is_left_behind(observed.on_example.changed)
                    return traced
            self._keep(eager.found, observed)

    def _keep(self, found: Mapping[str, str], observed: Observations) -> None:
        for path, reason in found.items():
            if any(call.marked for (called, _), call in observed.on_example.calls.items() if called == path):
                raise SplitError(
                    f"pipe_split() stands inside {path!r}, which cannot be traced and therefore cannot be cut inside "
                    f"({reason}); move the mark out of it"
                )
            # What is inside a module that stays as it is needs no mention.
            inside = [known for known in self.fallbacks if known.startswith(f"{path}.")]
            for known in inside:
                del self.fallbacks[known]
            self.fallbacks[path] = Fallback(path, reason)

    def _observations(self, training: bool | None) -> Observations:
        name = type(self.model).__name__
        example = read_example(self.model, self.args, self.kwargs, self.dynamic)
        if is_without_memory(self.model) or any(tensor.is_meta for tensor in example.tensors):
            raise TraceError(
                f"{name} cannot be traced{self._why_export_failed()}. To trace around the modules that fail, it has to "
                "run once on the example inputs, and on the meta device it cannot; build it on a device with memory, "
                "at a small size if needed, or change the line above"
            )
        copy = clone(self.model)
        if training is not None:
            copy.train(training)
        silence_hooks(copy, set())
        try:
            return run_on_example(copy, example)
        except ExampleError:
            raise
        except Exception as error:
            raise TraceError(
                f"{name} could not be traced with these example inputs, nor does it run with them uncut: "
                f"{why_and_where(error)}; give inputs that the model works with"
            ) from error

    def _warn_of_what_is_left_behind(self, changed: Iterable[str]) -> None:
        """Warn of attributes that modules set that stay as they are: their code does not run in the trace."""
        left = [name for name in changed if any(name.startswith(f"{path}.") for path in self.fallbacks)]
        new = [name for name in left if name not in self._left_behind]
        self._left_behind.update(new)
        if new:
            be = "is" if len(new) == 1 else "are"
            warn(
                f"{', '.join(new)} of {type(self.model).__name__} {be} set while a module runs that stays as it is. "
                "Code outside of that module that reads them has been traced with what they were before: hand such "
                "values over as tensors, in arguments and results"
            )

    def _why_export_failed(self) -> str:
        if self._export_failure is None or self._export_failure.__cause__ is None:
            return ""
        return f" by torch.export ({why_and_where(self._export_failure.__cause__)})"

    def _failed(self, error: BaseException) -> TraceError:
        lines = [f"{type(self.model).__name__} could not be traced, and so cannot be cut."]
        if self._export_failure is not None and self._export_failure.__cause__ is not None:
            lines.append(f"torch.export alone: {why_and_where(self._export_failure.__cause__)}")
        kept = f" ({', '.join(map(repr, self.fallbacks))})" if self.fallbacks else ""
        lines.append(f"around modules that stay as they are{kept}: {reason_of(error)}")
        place = place_of(error)
        if place:
            lines.append(f"at {place}")
        if isinstance(error, UntraceableError):
            lines.append(f"what to do: this is in the model's own forward, between its modules; {error.remedy}")
        else:
            lines.append(_REMEDIES[isinstance(error, HiddenTieError)])
        return TraceError("\n  ".join(lines))

    def _warn(self, new: list[Fallback]) -> None:
        if not new:
            return
        listed = "\n  ".join(
            f"{item.path!r} ({type(self.model.get_submodule(item.path)).__name__}): {item.reason}" for item in new
        )
        warn(
            f"torch.export cannot trace all of {type(self.model).__name__}. These modules stay as they are and are not "
            f"cut inside; all else is traced:\n  {listed}\nTo trace without this warning, pass tracer='fx'"
        )


def _example_of(value: Any, device: torch.device) -> Any:
    """Return a tensor like one of a call: a trace must not hold on to that, nor write to it."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).clone().requires_grad_(value.requires_grad)


def _asked_of(dynamic: Dynamic | None, example: Example) -> Dynamic | None:
    """Return the sizes that were asked for of inputs that a call has."""
    if not isinstance(dynamic, Mapping):
        return dynamic
    paths = [path for path, _, value in example.named if isinstance(value, torch.Tensor)]
    return {name: wish for name, wish in dynamic.items() if any(p == name or p.endswith(f"[{name!r}]") for p in paths)}


@contextlib.contextmanager
def _quiet_tracer() -> Iterator[None]:
    """Silence torch's log of decisions that it cannot make: the error says so in plain words."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    reject = logging.Filter("nobody")
    logger.addFilter(reject)
    try:
        yield
    finally:
        logger.removeFilter(reject)
