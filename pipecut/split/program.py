"""Programs of stages: trees of operations, whole module calls, and pieces of modules that are cut.

`partition` cuts a trace into one program per stage."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import nn
from torch.fx import GraphModule

from ..errors import PipeError, SplitError
from ..pipe_ir import (
    HERE,
    Condition,
    ConstantRef,
    Context,
    Fallback,
    Operation,
    Ref,
    Size,
    Span,
    Template,
    TracedModel,
    operator_name,
)
from ..text import shape_text
from ..torch_internals import is_overload, parameters_of, schema_of

# A value that travels by name through generated code: what an operation made, a symbolic dim, or the device (HERE).
Key: TypeAlias = int | sympy.Symbol | Any


@dataclass(frozen=True)
class WholeCall:
    """A module that lies in this stage as a whole: called as the model calls it, running its own code.

    `shapes` are those that its results must have, where the module's code decides about sizes.
    """

    span: Span
    makes: frozenset[int]
    shapes: tuple[tuple[int, tuple[Any, ...]], ...] = ()

    @property
    def context(self) -> Context:
        return self.span.context


@dataclass(frozen=True)
class FunctionCall:
    """A custom autograd function, applied as it is, with the backward that its author wrote."""

    span: Span
    makes: frozenset[int]

    @property
    def context(self) -> Context:
        return self.span.context


@dataclass(frozen=True)
class Checkpointed:
    """Items that run under torch.utils.checkpoint, as in the model."""

    span: Span
    body: tuple[Item, ...]

    @property
    def context(self) -> Context:
        return self.span.context


@dataclass(frozen=True)
class BufferUpdate:
    """`self.name = value` for a buffer that the forward assigns anew."""

    path: str
    name: str
    value: int
    context: Context


@dataclass(frozen=True)
class Piece:
    """The part of a module's call that lies in this stage, run by generated code."""

    path: str
    nth_call: int
    context: Context
    items: tuple[Item, ...]


Item = Operation | WholeCall | FunctionCall | Checkpointed | BufferUpdate | Piece


def body_of(item: Item) -> tuple[Item, ...]:
    """Return the items inside an item."""
    if isinstance(item, Piece):
        return item.items
    return item.body if isinstance(item, Checkpointed) else ()


def walk(items: tuple[Item, ...]) -> Iterator[Item]:
    """Yield all items, the inner ones after the one that holds them."""
    for item in items:
        yield item
        yield from walk(body_of(item))


def defined_by(item: Item) -> frozenset[int]:
    """Return the values that an item makes."""
    if isinstance(item, Operation):
        return frozenset({item.index})
    if isinstance(item, WholeCall | FunctionCall):
        return item.makes
    return frozenset(index for inner in body_of(item) for index in defined_by(inner))


def used_by(item: Item) -> frozenset[Key]:
    """Return the values from outside that an item needs."""
    if isinstance(item, Operation):
        return keys_in((item.args, item.kwargs))
    if isinstance(item, WholeCall):
        return keys_in(item.span.args) | keys_in(tuple(shape for _, shape in item.shapes))
    if isinstance(item, FunctionCall):
        return keys_in(item.span.args)
    if isinstance(item, BufferUpdate):
        return frozenset({item.value})
    arguments = keys_in(item.span.args) if isinstance(item, Checkpointed) else frozenset()
    return arguments | used_by_items(body_of(item))


def used_by_items(items: tuple[Item, ...]) -> frozenset[Key]:
    """Return what a sequence of items needs from outside."""
    defined: set[Key] = set()
    used: set[Key] = set()
    for item in items:
        used |= used_by(item) - defined
        defined |= defined_by(item)
    return frozenset(used)


def keys_in(value: Any) -> frozenset[Key]:
    """Return the values that an argument refers to."""
    if isinstance(value, Template):
        return keys_in(value.leaves)
    if isinstance(value, ConstantRef):
        return frozenset({value.index, HERE})
    if isinstance(value, Ref):
        return frozenset({value.index})
    if isinstance(value, Size):
        return frozenset(value.expr.free_symbols)
    if value is HERE:
        return frozenset({HERE})
    if isinstance(value, slice):
        return keys_in((value.start, value.stop, value.step))
    if isinstance(value, dict):
        return keys_in(tuple(value.values()))
    if isinstance(value, tuple | list):
        return frozenset(key for item in value for key in keys_in(item))
    return frozenset()


# Paths into a result that can be written down: result[0], result['mask'], result.logits.
_ACCESS = re.compile(r"^(\[('[^']*'|\d+)\]|\.\w+)$")


class _Dependencies:
    """Dependencies of module calls on the code around them.

    A call can be made as in the model if all comes in and goes out by its arguments, results and own state.
    """

    def __init__(self, traced: TracedModel, last_stage: int) -> None:
        self.traced = traced
        self.last_use = _last_uses(traced, last_stage)
        self._buffer_values = {
            index: f"{span.path}.{name}".lstrip(".")
            for span in traced.spans()
            for name, index in span.assigned_buffers.items()
        }

    def runs_alone(self, span: Span) -> bool:
        """Return True if calling the module's own code gives what was traced."""
        if not span.args.is_plain:
            return False
        if any(op.kind == "mark" for op in self.traced.operations_within(span.begin, span.end)):
            return False
        return not self._hidden_inputs(span) and not self._hidden_outputs(span)

    def why_not_whole(self, span: Span, fallback: Fallback) -> str:
        """Explain why a module that has to stay as it is cannot be called by generated code."""
        hidden = self._hidden(span)
        hidden += ["a part of it that another call in the same stage has in pieces"]
        return (
            f"{span.label!r} {fallback.because} ({fallback.reason}), so that it can only be called as a whole; the "
            f"module that calls it is cut, and it depends on {hidden[0]}, which generated code cannot pass on. Pass it "
            "tensors and plain values, or cut so that the module around it stays whole"
        )

    def check_function(self, span: Span) -> None:
        """Raise on an autograd function whose backward cannot be kept."""
        hidden = self._hidden(span)
        if hidden:
            raise SplitError(
                f"{span.options['function'].__name__}.apply() runs in the forward of "
                f"'{span.path or type(self.traced.model).__name__}', which is cut, and depends on {hidden[0]}, so that "
                "its backward cannot be kept; call it in a module of its own that is not cut, or pass all it needs as "
                "tensors"
            )

    def check_branches(self, op: Operation) -> None:
        """Raise on torch.cond and the like in generated code if their functions have parameters inside."""
        for branch in (self.traced.operations[index].constant for index in op.refs):
            if isinstance(branch, GraphModule) and any(node.op == "get_attr" for node in branch.graph.nodes):
                raise SplitError(
                    f"torch.{operator_name(op.target)} uses parameters or tensors of the model inside its functions, "
                    f"in a forward that is cut ({op.source}); pass them as operands, or move the call into a "
                    "module of its own that is not cut"
                )

    def is_dead(self, op: Operation) -> bool:
        """Return True if nobody uses the result of an operation, and it does nothing else."""
        if op.index in self.last_use or op.writes:
            return False
        if not is_overload(op.target) or not schema_of(op.target).returns:
            return False
        # An unused random number still moves the generator on.
        return torch.Tag.nondeterministic_seeded not in op.target.tags

    def _hidden(self, span: Span) -> list[str]:
        """Return in words what a call takes or gives that generated code cannot pass on."""
        around = (*self._hidden_inputs(span), *self._hidden_outputs(span))
        hidden = [] if span.args.is_plain else ["an argument that is neither a tensor nor a plain value"]
        return [*hidden, *(f"{name} outside its arguments and results" for name in around)]

    def _hidden_inputs(self, span: Span) -> list[str]:
        arguments = set(span.args.refs)
        hidden = []
        for op in self.traced.operations_within(span.begin, span.end):
            for index in op.refs:
                source = self.traced.operations[index]
                inside = source.tick >= span.begin or source.kind == "constant"
                own = inside or index in arguments or self._is_own_state(index, span.path)
                if not own or index in self.traced.reached_state:
                    hidden.append(self._called(source))
        return hidden

    def _hidden_outputs(self, span: Span) -> list[str]:
        leaves = zip(span.result.leaves, span.result.structure.paths(), strict=True)
        visible = {leaf.index for leaf, path in leaves if isinstance(leaf, Ref) and all(map(_ACCESS.match, path))}
        return [
            self._called(op)
            for op in self.traced.operations_within(span.begin, span.end)
            if self.last_use.get(op.index, -1) > span.end
            and op.index not in visible
            and not self._is_own_state(op.index, span.path)
        ]

    def _called(self, op: Operation) -> str:
        """Return the words for a value in messages: a parameter is called one."""
        name = next(iter(self.traced.state_names.get(op.index, ())), None)
        if name is None:
            return repr(op.name)
        return f"the {kind_of_state(self.traced.model, name)} {name!r}"

    def _is_own_state(self, index: int, path: str) -> bool:
        names = (*self.traced.state_names.get(index, ()), self._buffer_values.get(index, ""))
        return any(name.startswith(f"{path}.") for name in names)


def kind_of_state(model: nn.Module, name: str) -> str:
    """Return what a name of a model's state stands for: a parameter or a buffer."""
    path, _, attribute = name.rpartition(".")
    return "parameter" if attribute in parameters_of(model.get_submodule(path)) else "buffer"


def _last_uses(traced: TracedModel, last_stage: int) -> dict[int, int]:
    """Return the last tick at which each value is used; `last_stage` is the one at which the last stage begins."""
    last: dict[int, int] = {}
    for op in traced.operations:
        for index in op.refs:
            last[index] = max(last.get(index, -1), op.tick)
    for span in traced.spans():
        for index in span.args.refs:
            last[index] = max(last.get(index, -1), span.begin)
        for index in span.assigned_buffers.values():
            last[index] = max(last.get(index, -1), span.end)
    for index in traced.output.refs:
        if index not in traced.optional_outputs or traced.operations[index].tick >= last_stage:
            last[index] = traced.root.end + 1
    return last


# Decisions about sizes: those of generated code stand, those of whole modules are taken anew at every call.


def conditions_of_generated_code(traced: TracedModel, programs: Sequence[Piece]) -> tuple[Condition, ...]:
    """Return the conditions that a call must meet, each once."""
    whole = [item.span for program in programs for item in walk(program.items) if isinstance(item, WholeCall)]
    kept = [condition for condition in traced.conditions if not any(_covers(span, condition) for span in whole)]
    return tuple({condition.holds: condition for condition in reversed(kept)}.values())


def decides_about_sizes(traced: TracedModel, span: Span) -> bool:
    """Return True if the code of a call looks at sizes, so that its results may have other shapes in another call."""
    return any(_covers(span, condition) for condition in traced.conditions)


def _covers(span: Span, condition: Condition) -> bool:
    return span.begin <= condition.span_begin < span.end


def require_shape(tensor: Any, shape: tuple[int, ...], label: str) -> Any:
    """Raise if a tensor has another shape than in the trace; generated code calls this after a whole module."""
    if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) != shape:
        raise PipeError(
            f"{label!r} returned a tensor {shape_text(tensor.shape)}, where the trace has {shape_text(shape)} for "
            "these inputs; it decides about sizes: call pipeline() with an example of this size"
        )
    return tensor


def partition(
    traced: TracedModel, cuts: Sequence[int], *, keep_modules: bool = True, apart: Collection[str] = ()
) -> tuple[Piece, ...]:
    """Return the program of each stage; `cuts` are the ticks at which stages 1, 2, ... begin.

    Modules at the paths of `apart`, or all with `keep_modules=False`, are rebuilt from their traced operations.
    """
    bounds = [traced.root.begin, *cuts, traced.root.end + 1]
    partitioner = _Partitioner(traced, bounds[-2], keep_modules, {traced.model.get_submodule(path) for path in apart})
    return tuple(partitioner.stage(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False))


class _Partitioner:
    def __init__(self, traced: TracedModel, last_stage: int, keep: bool, apart: Collection[nn.Module]) -> None:
        self.traced, self.apart, self.keep_modules = traced, apart, keep
        self.dependencies = _Dependencies(traced, last_stage)
        self.taken_apart: set[tuple[str, int]] = set()

    def stage(self, begin: int, end: int) -> Piece:
        """Return the program of one stage."""
        self.taken_apart = set()
        while True:
            program = self._piece(self.traced.root, begin, end)
            broken = self._whole_around_pieces(program)
            if not broken:
                return program
            self.taken_apart |= broken

    def _whole_around_pieces(self, program: Piece) -> set[tuple[str, int]]:
        """Find calls that look whole, of a module that another call in this stage has in pieces, or with one inside."""
        get = self.traced.model.get_submodule
        pieces = {get(item.path) for item in walk(program.items) if isinstance(item, Piece)} | set(self.apart)
        calls = (item.span for item in walk(program.items) if isinstance(item, WholeCall))
        return {
            (span.path, span.nth_call) for span in calls if any(module in pieces for module in get(span.path).modules())
        }

    def _piece(self, span: Span, begin: int, end: int) -> Piece:
        return Piece(span.path, span.nth_call, span.context, tuple(self._items(span, begin, end)))

    def _items(self, span: Span, begin: int, end: int) -> Iterator[Item]:
        """Yield the part of a span between two ticks."""
        begin, end = max(begin, span.begin), min(end, span.end)
        position = begin
        for child in span.children:
            if child.end < begin or child.begin >= end:
                continue
            yield from self._operations(position, child.begin)
            item = self._child(child, begin, end)
            if not isinstance(item, Piece) or item.items:
                yield item
            position = child.end
        yield from self._operations(position, end)
        for name, index in span.assigned_buffers.items():
            made = max(self.traced.operations[index].tick, span.begin)
            if begin <= made < end:
                # At the end of the piece that makes the value: what comes before may still read the old one.
                yield BufferUpdate(span.path, name, index, span.context)

    def _operations(self, begin: int, end: int) -> Iterator[Item]:
        for op in self.traced.operations_within(begin, end):
            if op.kind == "op" and not self.dependencies.is_dead(op):
                self.dependencies.check_branches(op)
                yield op

    def _child(self, child: Span, begin: int, end: int) -> Item:
        if child.kind == "checkpoint":
            return Checkpointed(child, tuple(self._items(child, begin, end)))
        if child.kind == "function":
            self.dependencies.check_function(child)
            return FunctionCall(child, self._made_in(child))
        fallback = self.traced.fallback(child.path)
        whole = (self.keep_modules or fallback is not None) and begin <= child.begin and child.end < end
        if whole and (child.path, child.nth_call) not in self.taken_apart and self.dependencies.runs_alone(child):
            return WholeCall(child, self._made_in(child), self._shapes_to_check(child))
        if fallback is not None:
            raise SplitError(self.dependencies.why_not_whole(child, fallback))
        return self._piece(child, begin, end)

    def _shapes_to_check(self, span: Span) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        if not decides_about_sizes(self.traced, span) and self.traced.fallback(span.path) is None:
            return ()
        specs = {index: self.traced.operations[index].spec for index in sorted(self._made_in(span))}
        return tuple(
            (index, tuple(dim if isinstance(dim, int) else Size(dim) for dim in spec.shape))
            for index, spec in specs.items()
            if spec is not None and spec.symbols <= self.traced.dims.keys()
        )

    def _made_in(self, span: Span) -> frozenset[int]:
        return frozenset(index for index in span.result.refs if self.traced.operations[index].tick >= span.begin)
