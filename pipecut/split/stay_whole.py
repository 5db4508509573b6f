"""Modules that generated code cannot stand for: cuts go around them, or raise.

A trace is one run. What a forward does beside its operations, or only in that run, is found by running it again; the
module that does it stays whole, and runs its own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..errors import SplitError
from ..pipe_ir import Effect, Fallback, ModelTracer, TracedModel, line_text
from .build import generated_paths
from .outside import constant_writes, find_difference, whole_calls
from .points import SplitPlan
from .program import Piece
from .value_numbers import Call

_FindCuts: TypeAlias = Callable[[TracedModel], SplitPlan]

_BESIDE = "which is no operation of a trace"
_FROM_OUTSIDE = "generated code would do what the trace did, every time"
_REMEDY = (
    "what to do: move these lines into a module that is not cut, which then runs its own code; or hand the value over "
    "as a tensor, in arguments and results; or cut elsewhere"
)


@dataclass(frozen=True)
class Cuts:
    """A trace with the modules that stay whole in it, its cuts, and the programs of its stages."""

    traced: TracedModel
    plan: SplitPlan
    programs: tuple[Piece, ...]
    only_with_gradients: frozenset[str] = frozenset()  # modules whose forward does something else under no_grad


@dataclass(frozen=True)
class _Fault:
    """A reason for which a module cannot run as generated code."""

    path: str
    text: str
    needs_gradients: bool = False


class Checks:
    """Checks of the generated code of one traced run of a model; the runs to compare with are made once."""

    def __init__(
        self, tracer: ModelTracer, traced: TracedModel, live_hooks: set[str], training: bool | None = None
    ) -> None:
        self._replay_apart = functools.cache(lambda: tracer.replays(traced, live_hooks, training, apart=True).runs)
        self._again = tracer.replays(traced, live_hooks, training)
        self._replays = self._again.runs

    def changing_paths(self, cuts: Cuts) -> set[str]:
        """Return the modules that generated code cannot stand for."""
        fault = self._fault(cuts)
        return set() if fault is None else {fault.path}

    def kept_whole(self, cuts: Cuts, find_cuts: _FindCuts, partition: Callable[..., tuple[Piece, ...]]) -> Cuts:
        """Return cuts around all modules that generated code cannot stand for; raise if there are none."""
        while (fault := self._fault(cuts)) is not None:
            fallback = Fallback(fault.path, fault.text, "has to run its own code")
            traced = replace(cuts.traced, fallbacks=(*cuts.traced.fallbacks, fallback))
            try:
                if not fault.path:
                    raise SplitError(_cannot_be_cut(cuts.traced, fault))
                plan = find_cuts(traced)
                cuts = replace(cuts, traced=traced, plan=plan, programs=partition(traced, plan.ticks))
            except SplitError as error:
                if fault.needs_gradients:
                    cuts = replace(cuts, only_with_gradients=cuts.only_with_gradients | {fault.path})
                    continue
                raise SplitError(_cannot_be_cut(cuts.traced, fault)) from (error if fault.path else None)
        paths = generated_paths(cuts.programs)
        kept = tuple(replace(each, is_lost=each.is_copied or each.path in paths) for each in self._again.kept)
        return replace(cuts, traced=replace(cuts.traced, changing=self._changing(cuts.traced), kept=kept))

    def _fault(self, cuts: Cuts) -> _Fault | None:
        paths, whole = generated_paths(cuts.programs), whole_calls(cuts.programs)
        effects = (effect for effect in self._effects(cuts.traced) if effect.path in paths)
        found = next((_Fault(effect.path, f"it uses {effect.what}, {_BESIDE}") for effect in effects), None)
        found = found or next(_writes(cuts.traced, whole), None) or self._difference(cuts, whole)
        return found or next(self._uses(paths), None)

    def _uses(self, paths: Collection[str]) -> Iterator[_Fault]:
        """Yield uses of Python's state that made no difference in any run, and may in another."""
        for effect in self._again.effects:
            if effect.path in paths:
                yield _Fault(effect.path, f"it uses {effect.what}: {_FROM_OUTSIDE}")
        for kept in self._again.kept:
            others = sorted(kept.used_by - set(paths))
            if kept.path in paths and others:
                yield _Fault(kept.path, f"it changes {kept.name!r}, a number by which {others[0]!r} decides, {_BESIDE}")

    def _difference(self, cuts: Cuts, whole: Collection[Call]) -> _Fault | None:
        found = find_difference(cuts.traced, whole, self._replays)
        if found is not None and found.how != self._replays[0].how:
            # The second run differs from the trace in several respects: runs that differ in one each tell which.
            found = find_difference(cuts.traced, whole, self._replay_apart()) or found
        if found is None or (found.needs_gradients and found.path in cuts.only_with_gradients):
            return None
        return _Fault(found.path, f"{found}: {_FROM_OUTSIDE}", found.needs_gradients)

    def _effects(self, traced: TracedModel) -> Iterator[Effect]:
        assert traced.history is not None
        for history in (traced.history, *(replay.history for replay in self._replays)):
            yield from (effect for effect in history.effects if not effect.is_use)

    def _changing(self, traced: TracedModel) -> frozenset[str]:
        """Return all modules, whole ones too, that do more than a trace shows, or something else in another run."""
        found = {effect.path for effect in (*self._effects(traced), *self._again.effects)}
        found |= {write.path for write in constant_writes(traced, ())}
        calls = [(span.path, span.nth_call) for span in traced.spans("call")]
        while (new := find_difference(traced, {call for call in calls if call[0] in found}, self._replays)) is not None:
            paths = {new.path, new.also} - {"", *found}
            if not paths:
                break
            found |= paths
        return frozenset(found)


def _cannot_be_cut(traced: TracedModel, fault: _Fault) -> str:
    return f"the forward of {fault.path or type(traced.model).__name__!r} is cut: {fault.text}; {_REMEDY}"


def _writes(traced: TracedModel, whole: Collection[Call]) -> Iterator[_Fault]:
    """Yield writes of generated code to tensors that no stage keeps."""
    for write in constant_writes(traced, whole):
        place = f" at {line_text(write.line)}" if write.line is not None else ""
        yield _Fault(
            write.path,
            f"it writes to a tensor that is neither an argument nor a parameter or buffer{place} (to count in a "
            "buffer, register_buffer() it)",
        )
