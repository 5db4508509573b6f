"""Cuts the list of traced steps into one program per stage."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from types import FunctionType

import torch
from torch import nn
from torch.fx import GraphModule

from ..errors import SplitError
from ..pipe_ir.effects import operator_name
from ..pipe_ir.traced import Span, Step, TracedModel
from .program import BufferUpdate, Checkpointed, FunctionCall, Item, Operation, Piece, WholeCall, walk

_ACCESS = re.compile(r"^(\[('[^']*'|\d+)\]|\.\w+)$")


def partition(traced: TracedModel, cuts: Sequence[int], *, keep_modules: bool = True) -> tuple[Piece, ...]:
    """The program of each stage; `cuts` are the ticks at which stages 1, 2, ... begin.

    With `keep_modules=False` every module is rebuilt from its traced operations instead of being called as it is.
    """
    bounds = [traced.root.begin, *cuts, traced.root.end + 1]
    partitioner = _Partitioner(traced, keep_modules)
    return tuple(partitioner.stage(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False))


class _Partitioner:
    def __init__(self, traced: TracedModel, keep_modules: bool) -> None:
        self.traced = traced
        self.keep_modules = keep_modules
        self.ticks = [step.tick for step in traced.steps if step.tick >= 0]
        self.timed = [step for step in traced.steps if step.tick >= 0]
        self.last_use = _last_uses(traced)
        self.reaching: dict[str, bool] = {}
        self.taken_apart: set[tuple[str, int]] = set()
        self.buffer_values = {
            index: f"{span.path}.{name}".lstrip(".")
            for span in traced.spans()
            for name, index in span.assigned_buffers.items()
        }

    def stage(self, begin: int, end: int) -> Piece:
        """The program of one stage."""
        self.taken_apart = set()
        while True:
            program = self.piece(self.traced.root, begin, end)
            broken = self._whole_around_pieces(program)
            if not broken:
                return program
            self.taken_apart |= broken

    def _whole_around_pieces(self, program: Piece) -> set[tuple[str, int]]:
        """Calls that look whole, and call inside them a module that another call in this stage has in pieces."""
        get = self.traced.model.get_submodule
        pieces = {get(item.path) for item in walk(program.items) if isinstance(item, Piece)}
        calls = (item.span for item in walk(program.items) if isinstance(item, WholeCall))
        return {
            (span.path, span.nth_call)
            for span in calls
            if any(module in pieces for module in get(span.path).modules() if module is not get(span.path))
        }

    def piece(self, span: Span, begin: int, end: int) -> Piece:
        items = tuple(item for item in self._items(span, begin, end) if not self._is_dead(item))
        return Piece(span.path, span.nth_call, span.context, items)

    def _items(self, span: Span, begin: int, end: int) -> Iterator[Item]:
        """The part of a span between two ticks."""
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
            made = max(self.traced.steps[index].tick, span.begin)
            if begin <= made < end:
                # At the end of the piece that makes the value: what comes before may still read the old one.
                yield BufferUpdate(span.path, name, index, span.context)

    def _operations(self, begin: int, end: int) -> Iterator[Item]:
        for step in self._steps(begin, end):
            if step.kind == "op":
                self._check_branches(step)
                yield Operation(step)

    def _child(self, child: Span, begin: int, end: int) -> Item:
        if child.kind == "checkpoint":
            return Checkpointed(child, tuple(self._items(child, begin, end)))
        if child.kind == "function":
            self._check_function(child)
            return FunctionCall(child, self._made_in(child))
        whole = begin <= child.begin and child.end < end
        if whole and self.keep_modules and self._runs_alone(child):
            return WholeCall(child, self._made_in(child))
        return self.piece(child, begin, end)

    def _made_in(self, span: Span) -> frozenset[int]:
        return frozenset(index for index in span.result.refs if self.traced.steps[index].tick >= span.begin)

    def _steps(self, begin: int, end: int) -> list[Step]:
        return self.timed[bisect.bisect_left(self.ticks, begin) : bisect.bisect_left(self.ticks, end)]

    def _runs_alone(self, span: Span) -> bool:
        """Whether calling the module's own code gives what was traced: all comes in and goes out by its interface."""
        if (span.path, span.nth_call) in self.taken_apart or self._reaches_beyond(span.path):
            return False
        if not span.args.is_plain or any(step.kind == "mark" for step in self._steps(span.begin, span.end)):
            return False
        return not self._hidden_inputs(span) and not self._hidden_outputs(span)

    def _reaches_beyond(self, path: str) -> bool:
        """Whether a module keeps a function that holds on to modules or tensors: its copy would use the originals."""
        if path not in self.reaching:
            module = self.traced.model.get_submodule(path)
            self.reaching[path] = any(
                isinstance(value, FunctionType) and _holds_state(value)
                for part in module.modules()
                for value in vars(part).values()
            )
        return self.reaching[path]

    def _hidden_inputs(self, span: Span) -> list[str]:
        arguments = set(span.args.refs)
        hidden = []
        for step in self._steps(span.begin, span.end):
            for index in step.refs:
                source = self.traced.steps[index]
                inside = source.tick >= span.begin or source.kind == "constant"
                if not inside and index not in arguments and not self._is_own_state(index, span.path):
                    hidden.append(source.name)
        return hidden

    def _hidden_outputs(self, span: Span) -> list[str]:
        visible = {
            leaf.index
            for leaf, path in zip(span.result.leaves, span.result.structure.paths(), strict=True)
            if hasattr(leaf, "index") and all(_ACCESS.match(step) for step in path)
        }
        return [
            step.name
            for step in self._steps(span.begin, span.end)
            if self.last_use.get(step.index, -1) > span.end
            and step.index not in visible
            and not self._is_own_state(step.index, span.path)
        ]

    def _is_own_state(self, index: int, path: str) -> bool:
        names = (*self.traced.state_names.get(index, ()), self.buffer_values.get(index, ""))
        return any(name.startswith(f"{path}.") for name in names)

    def _is_dead(self, item: Item) -> bool:
        """Whether an item is an operation whose result nobody uses and that does nothing else."""
        if not isinstance(item, Operation) or item.step.index in self.last_use or item.step.writes:
            return False
        tags = getattr(item.step.target, "tags", None)
        # An unused random number still moves the generator on. What is not a torch operator may do anything.
        return tags is not None and not any(tag.name == "nondeterministic_seeded" for tag in tags)

    def _check_branches(self, step: Step) -> None:
        """The branches of torch.cond and the like can be generated code only if they have no parameters inside."""
        for branch in (self.traced.steps[index].constant for index in step.refs):
            if isinstance(branch, GraphModule) and any(node.op == "get_attr" for node in branch.graph.nodes):
                raise SplitError(
                    f"torch.{operator_name(step.target)} uses parameters or tensors of the model inside its functions, "
                    f"in a forward that is cut ({step.source}); pass them as operands, or move the call into a "
                    "module of its own that is not cut"
                )

    def _check_function(self, span: Span) -> None:
        hidden = [] if span.args.is_plain else ["an argument that is neither a tensor nor a plain value"]
        hidden += self._hidden_inputs(span) + self._hidden_outputs(span)
        if hidden:
            raise SplitError(
                f"{span.options['function'].__name__}.apply() runs in the forward of "
                f"'{span.path or type(self.traced.model).__name__}', which is cut, and depends on {hidden[0]} outside "
                "its arguments and results, so that its backward cannot be kept; call it in a module of its own that "
                "is not cut, or pass all it needs as tensors"
            )


def _last_uses(traced: TracedModel) -> dict[int, int]:
    """The last tick at which each value is used, by an operation or as an argument of a call."""
    last: dict[int, int] = {}
    for step in traced.steps:
        for index in step.refs:
            last[index] = max(last.get(index, -1), step.tick)
    for span in traced.spans():
        for index in span.args.refs:
            last[index] = max(last.get(index, -1), span.begin)
    for index in traced.output.refs:
        last[index] = traced.root.end + 1
    return last


def _holds_state(function: FunctionType) -> bool:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return any(isinstance(content, nn.Module | torch.Tensor) for content in cells)
