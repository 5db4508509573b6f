"""Which steps another stage may run again, and get the same bits: masks, positions, tables of sines."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..pipe_ir.effects import operator_name
from ..pipe_ir.trace import has_forward_hooks
from ..pipe_ir.traced import Span, Step, TracedModel
from .decisions import decides_about_sizes
from .modes import Modes
from .program import Piece, WholeCall, walk
from .state import written_state
from .wholeness import Wholeness

# `torch.tensor(1.0)` in a forward is traced as a copy that is detached in place; without a gradient that is nothing.
_HARMLESS_WRITES = ("aten::detach_",)

_RANDOM = (torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise)


class Repeatable:
    """Knows of each step whether it depends on nothing but sizes, constants, fixed buffers and model inputs."""

    def __init__(self, traced: TracedModel, programs: Sequence[Piece], modes: Modes) -> None:
        self.traced = traced
        self._written = {
            traced.steps[index].storage
            for step in traced.steps
            if operator_name(step.target) not in _HARMLESS_WRITES
            for index in step.writes
        }
        self._written |= {traced.steps[index].storage for span in _untraced(traced) for index in span.args.refs}
        steps_of = Wholeness(traced).steps
        opaque = self._opaque_spans(programs)
        self._barred = {step.index for span in opaque for step in steps_of(span.begin, span.end)}
        self._barred |= modes.switches.keys()
        self._fixed = _buffers_to_copy(traced.model) - _changing_buffers(traced, modes)
        self._yes: set[int] = set()
        for step in traced.steps:
            if self._can(step):
                self._yes.add(step.index)

    def __contains__(self, index: int) -> bool:
        return index in self._yes

    def chain(self, values: Iterable[int]) -> list[Step]:
        """The operations that make the values, all of them, in order."""
        found: set[int] = set()
        waiting = list(values)
        while waiting:
            index = waiting.pop()
            if index not in found and self.traced.steps[index].kind == "op":
                found.add(index)
                waiting += self.traced.steps[index].refs
        return [self.traced.steps[index] for index in sorted(found)]

    def model_inputs(self, values: Iterable[int]) -> frozenset[int]:
        """The model inputs that the values are made from."""
        refs = {index for step in self.chain(values) for index in step.refs}
        return frozenset(index for index in refs if self.traced.steps[index].kind == "input")

    def _can(self, step: Step) -> bool:
        if step.storage in self._written and step.storage is not None:
            return False
        if step.spec is not None and (step.spec.requires_grad or not step.spec.symbols <= self.traced.dims.keys()):
            return False
        return step.kind == "input" or (step.kind in _KINDS and _KINDS[step.kind](self, step))

    def _is_fixed_buffer(self, step: Step) -> bool:
        """A parameter is none: it changes in training, and its copies would have to be kept alike."""
        return self._fixed.issuperset(self.traced.state_names[step.index])

    def _is_fixed_tensor(self, step: Step) -> bool:
        return isinstance(step.constant, torch.Tensor) and not step.constant.requires_grad

    def _is_repeatable_operation(self, step: Step) -> bool:
        known = step.target is operator.getitem or _is_pure(step.target)
        if not known or step.writes or step.context.vmap or step.index in self._barred:
            return False
        return all(index in self._yes for index in step.refs)

    def _opaque_spans(self, programs: Sequence[Piece]) -> Iterator[Span]:
        """Calls whose operations may be others next time, or do more than a trace shows."""
        yield from (span for span in self.traced.spans() if span.kind != "call")
        for item in (item for program in programs for item in walk(program.items)):
            if isinstance(item, WholeCall) and not self._is_as_traced(item.span):
                yield item.span

    def _is_as_traced(self, span: Span) -> bool:
        """Whether a module that runs its own code does the traced operations whenever it is called."""
        traced = self.traced
        paths = {inner.path for inner in span.walk()}
        alive = traced.mode_readers | traced.assigned_attributes.keys() | traced.forgotten.keys()
        hooked = any(has_forward_hooks(traced.model.get_submodule(path)) for path in paths)
        return not (hooked or paths & alive or decides_about_sizes(traced, span))


_KINDS: dict[str, Callable[[Repeatable, Step], bool]] = {
    "state": Repeatable._is_fixed_buffer,
    "constant": Repeatable._is_fixed_tensor,
    "op": Repeatable._is_repeatable_operation,
}


def _is_pure(target: Any) -> bool:
    """Whether an operation makes tensors from its arguments alone, the same ones every time."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    returns = target._schema.returns
    gives_tensors = bool(returns) and all(str(each.type) in ("Tensor", "List[Tensor]") for each in returns)
    uninitialised = operator_name(target).removeprefix("aten::").removeprefix("new_").startswith("empty")
    return (
        gives_tensors
        and not target._schema.is_mutable
        and not uninitialised
        and not any(tag in target.tags for tag in _RANDOM)
    )


def _buffers_to_copy(model: nn.Module) -> set[str]:
    """The buffers that a second stage can hold too.

    One without memory that is not saved is filled in by code that knows its module, where that module runs.
    """
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            unknown = buffer is None or (buffer.is_meta and name in module._non_persistent_buffers_set)
            found |= set() if unknown else {f"{path}.{name}".lstrip(".")}
    return found


def _changing_buffers(traced: TracedModel, modes: Modes) -> set[str]:
    """The buffers that a forward updates, in this mode or perhaps in the other one."""
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
    """Calls of modules that could not be traced: nobody knows what they write to."""
    paths = {fallback.path for fallback in traced.fallbacks}
    return (span for span in traced.spans("call") if span.path in paths)
