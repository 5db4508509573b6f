"""Recomputation of cheap values (masks, positions, tables of sines) where they are used, instead of sending them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from ..pipe_ir import Operation, RecomputedValue, Span, TracedModel, has_forward_hooks, operator_of
from ..torch_internals import buffers_of, is_overload, schema_of, unsaved_buffers
from .cost import ConcreteCosts
from .dataflow import FlowFinder
from .modes import ModeDifferences
from .program import (
    Checkpointed,
    Item,
    Key,
    Piece,
    WholeCall,
    decides_about_sizes,
    keys_in,
    used_by,
    used_by_items,
    walk,
)
from .state import written_state

# How much work (an element written, a floating-point operation) is worth one byte that is not sent. Links between
# machines are some 20 to 100 times slower than memory and thousands of times slower than arithmetic; the low end,
# since a link may also be within a machine.
_WORK_PER_BYTE = 16


# What a message costs however short it is, as the bytes that a link carries meanwhile: some 10 microseconds at some
# gigabytes a second. All that a stage sends to another is one message, so that it counts where two stages have no
# other business with each other.
_BYTES_PER_MESSAGE = 2**16


def recompute(
    traced: TracedModel,
    cuts: Sequence[int],
    programs: Sequence[Piece],
    names: Mapping[int, str],
    modes: ModeDifferences,
) -> tuple[tuple[Piece, ...], tuple[RecomputedValue, ...]]:
    """Return the programs with cheap values made where they are used, and these values."""
    finder = FlowFinder(traced, cuts, programs, names)
    recomputable = _Recomputable(traced, programs, modes)
    chosen = [_Chooser(finder, recomputable, stage).choose() for stage in range(1, len(programs))]
    values = tuple(
        RecomputedValue(value, names[value], finder.made_in[value], stage, finder.spec(value))
        for stage, mine in enumerate(chosen, start=1)
        for value in sorted(mine)
    )
    if not values:
        return tuple(programs), ()
    repeated = [
        replace(program, items=(*recomputable.chain(mine), *program.items))
        for program, mine in zip(programs[1:], chosen, strict=True)
    ]
    fuller = (programs[0], *repeated)
    sent = [set(stage.outputs) for stage in FlowFinder(traced, cuts, fuller, names).find().stages]
    sent[-1] |= set(traced.output.refs)
    return tuple(
        _without_unused(program, kept, recomputable) for program, kept in zip(fuller, sent, strict=True)
    ), values


class _Chooser:
    """Choice of the values that one stage makes itself."""

    def __init__(self, finder: FlowFinder, recomputable: _Recomputable, stage: int) -> None:
        self.finder, self.recomputable, self.stage = finder, recomputable, stage
        self.traced = finder.traced
        self.costs = ConcreteCosts(self.traced, self.traced.hints)
        self.needs = finder.needs(stage)

    def choose(self) -> frozenset[int]:
        """Return the received values that are better made here."""
        chosen: frozenset[int] = frozenset()
        for group in self._groups():
            if self._cost(chosen | group) < self._cost(chosen):
                chosen |= group
        return chosen

    def _groups(self) -> Iterator[frozenset[int]]:
        """Group values by the model inputs that they need: together they may be worth the inputs. Then each alone."""
        received = [value for value in self.finder.arriving(self.stage, self.needs) if self._is_candidate(value)]
        groups: dict[frozenset[int], set[int]] = {}
        for value in received:
            groups.setdefault(self.recomputable.model_inputs([value]), set()).add(value)
        yield from (frozenset(groups[inputs]) for inputs in sorted(groups, key=lambda each: (len(each), sorted(each))))
        yield from (frozenset({value}) for value in sorted(received))

    def _is_candidate(self, value: int) -> bool:
        return self.traced.operations[value].kind == "op" and value in self.recomputable

    def _cost(self, values: Iterable[int]) -> float:
        """Return the bytes that the stage receives, plus the work for the values, as the bytes that this is worth."""
        chain = self.recomputable.chain(values)
        made = {op.index for op in chain}
        keys: frozenset[Key] = (self.needs - made) | used_by_items(tuple(chain))
        received = self.finder.arriving(self.stage, keys)
        if not any(self.traced.operations[value].kind == "op" for value in received):
            return float("inf")  # a stage that waits for nobody would run ahead of all others
        messages = {self.finder.sender(value, self.stage) for value in received}
        sent = sum(map(self._bytes, received)) + _BYTES_PER_MESSAGE * len(messages)
        return sent + sum(map(self._work, chain)) / _WORK_PER_BYTE

    def _work(self, op: Operation) -> int:
        is_view = op.storage is not None and any(
            self.traced.operations[index].storage == op.storage for index in op.refs
        )
        return 1 if is_view else self.costs.operation(op)

    def _bytes(self, value: int) -> int:
        spec = self.traced.operations[value].spec
        return 0 if spec is None else self.costs.elements(spec) * spec.dtype.itemsize


_RANDOM = (torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise)


class _Recomputable:
    """Values that depend on sizes, constants, fixed buffers and inputs only: computed again they are the same bits."""

    def __init__(self, traced: TracedModel, programs: Sequence[Piece], modes: ModeDifferences) -> None:
        self.traced = traced
        self._written = {
            traced.operations[index].storage
            for op in traced.operations
            if operator_of(op.target).writes_values
            for index in op.writes
        }
        self._written |= {traced.operations[index].storage for span in _untraced(traced) for index in span.args.refs}
        opaque = self._opaque_spans(programs)
        self._barred = {op.index for span in opaque for op in traced.operations_within(span.begin, span.end)}
        self._barred |= modes.switches.keys()
        self._fixed = _buffers_to_copy(traced.model) - _changing_buffers(traced, modes)
        self._yes: set[int] = set()
        for op in traced.operations:
            if self._can(op):
                self._yes.add(op.index)

    def __contains__(self, index: int) -> bool:
        return index in self._yes

    def chain(self, values: Iterable[int]) -> list[Operation]:
        """Return the operations that make the values, all of them, in order."""
        found: set[int] = set()
        waiting = list(values)
        while waiting:
            index = waiting.pop()
            if index not in found and self.traced.operations[index].kind == "op":
                found.add(index)
                waiting += self.traced.operations[index].refs
        return [self.traced.operations[index] for index in sorted(found)]

    def model_inputs(self, values: Iterable[int]) -> frozenset[int]:
        """Return the model inputs that the values are made from."""
        refs = {index for op in self.chain(values) for index in op.refs}
        return frozenset(index for index in refs if self.traced.operations[index].kind == "input")

    def _can(self, op: Operation) -> bool:
        if op.storage in self._written and op.storage is not None:
            return False
        if op.spec is not None and (op.spec.requires_grad or not op.spec.symbols <= self.traced.dims.keys()):
            return False
        return op.kind == "input" or (op.kind in _KINDS and _KINDS[op.kind](self, op))

    def _is_fixed_buffer(self, op: Operation) -> bool:
        """Return True for a buffer that stays as it is. A parameter changes in training."""
        return self._fixed.issuperset(self.traced.state_names[op.index])

    def _is_fixed_tensor(self, op: Operation) -> bool:
        return isinstance(op.constant, torch.Tensor) and not op.constant.requires_grad

    def _is_recomputable_operation(self, op: Operation) -> bool:
        known = op.target is operator.getitem or _is_pure(op.target)
        if not known or op.writes or op.context.vmap or op.index in self._barred:
            return False
        return all(index in self._yes for index in op.refs)

    def _opaque_spans(self, programs: Sequence[Piece]) -> Iterator[Span]:
        """Yield calls whose operations may be others next time, or do more than a trace shows."""
        yield from (span for span in self.traced.spans() if span.kind != "call")
        for item in (item for program in programs for item in walk(program.items)):
            if isinstance(item, WholeCall) and not self._is_as_traced(item.span):
                yield item.span

    def _is_as_traced(self, span: Span) -> bool:
        """Return True if a module that runs its own code does the traced operations whenever it is called."""
        traced = self.traced
        paths = {inner.path for inner in span.walk()}
        alive = traced.mode_readers | traced.assigned_attributes.keys() | traced.changing
        hooked = any(has_forward_hooks(traced.model.get_submodule(path)) for path in paths)
        return not (hooked or paths & alive or decides_about_sizes(traced, span))


_KINDS: dict[str, Callable[[_Recomputable, Operation], bool]] = {
    "state": _Recomputable._is_fixed_buffer,
    "constant": _Recomputable._is_fixed_tensor,
    "op": _Recomputable._is_recomputable_operation,
}


def _is_pure(target: Any) -> bool:
    """Return True if an operation makes tensors from its arguments alone, the same ones every time."""
    if not is_overload(target) or target.namespace != "aten":
        return False
    returns = schema_of(target).returns
    gives_tensors = bool(returns) and all(str(each.type) in ("Tensor", "List[Tensor]") for each in returns)
    return (
        gives_tensors
        and not schema_of(target).is_mutable
        and operator_of(target).is_deterministic
        and not any(tag in target.tags for tag in _RANDOM)
    )


def _buffers_to_copy(model: nn.Module) -> set[str]:
    """Return the buffers that a second stage can hold too.

    One without memory that is not saved is filled in by code that knows its module, where that module runs.
    """
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in buffers_of(module).items():
            unknown = buffer is None or (buffer.is_meta and name in unsaved_buffers(module))
            found |= set() if unknown else {f"{path}.{name}".lstrip(".")}
    return found


def _changing_buffers(traced: TracedModel, modes: ModeDifferences) -> set[str]:
    """Return the buffers that a forward updates, in this mode or perhaps in the other one."""
    changing = written_state(traced)
    for fallback in traced.fallbacks:
        changing |= _buffers_below(traced, fallback.path)
    if modes.written_in_other is not None:
        return changing | modes.written_in_other
    # Nobody has looked at the other mode: a module that looks at the mode may update whatever it holds.
    for path in traced.mode_readers:
        changing |= _buffers_below(traced, path)
    return changing


def _buffers_below(traced: TracedModel, path: str) -> set[str]:
    inside = traced.model.get_submodule(path).named_buffers(remove_duplicate=False)
    return {f"{path}.{name}".lstrip(".") for name, _ in inside}


def _untraced(traced: TracedModel) -> Iterator[Span]:
    """Return calls of modules that could not be traced: nobody knows what they write to."""
    paths = {fallback.path for fallback in traced.fallbacks}
    return (span for span in traced.spans("call") if span.path in paths)


class _Droppable(Protocol):
    """Operations that do nothing but make their value."""

    def __contains__(self, index: int) -> bool: ...


def _without_unused(program: Piece, wanted: Iterable[Key], droppable: _Droppable) -> Piece:
    """Return a program without the droppable operations whose values are neither used in it nor wanted from it."""
    return replace(program, items=_kept(program.items, set(wanted), droppable))


def _kept(items: tuple[Item, ...], needed: set[Key], droppable: _Droppable) -> tuple[Item, ...]:
    """Return the items that stay; `needed` grows by what these use, from the last item to the first."""
    kept: list[Item] = []
    for item in reversed(items):
        if isinstance(item, Operation) and item.index in droppable and item.index not in needed:
            continue
        if isinstance(item, Piece):
            item = replace(item, items=_kept(item.items, needed, droppable))
            kept += [item] if item.items else []
            continue
        needed |= used_by(item) | (keys_in(item.span.result) if isinstance(item, Checkpointed) else frozenset())
        kept.append(item)
    return tuple(reversed(kept))
