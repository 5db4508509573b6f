"""Cuts the list of traced steps into one program per stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import SplitError
from ..pipe_ir.traced import Size, Span, TracedModel
from .decisions import decides_about_sizes
from .program import BufferUpdate, Checkpointed, FunctionCall, Item, Operation, Piece, WholeCall, walk
from .wholeness import Wholeness


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
        self.wholeness = Wholeness(traced)
        self.taken_apart: set[tuple[str, int]] = set()

    def stage(self, begin: int, end: int) -> Piece:
        """The program of one stage."""
        self.taken_apart = set()
        while True:
            program = self._piece(self.traced.root, begin, end)
            broken = self._whole_around_pieces(program)
            if not broken:
                return program
            self.taken_apart |= broken

    def _whole_around_pieces(self, program: Piece) -> set[tuple[str, int]]:
        """Calls that look whole, of a module that another call in this stage has in pieces, or with one inside."""
        get = self.traced.model.get_submodule
        pieces = {get(item.path) for item in walk(program.items) if isinstance(item, Piece)}
        calls = (item.span for item in walk(program.items) if isinstance(item, WholeCall))
        return {
            (span.path, span.nth_call) for span in calls if any(module in pieces for module in get(span.path).modules())
        }

    def _piece(self, span: Span, begin: int, end: int) -> Piece:
        return Piece(span.path, span.nth_call, span.context, tuple(self._items(span, begin, end)))

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
        for step in self.wholeness.steps(begin, end):
            if step.kind == "op" and not self.wholeness.is_dead(step):
                self.wholeness.check_branches(step)
                yield Operation(step)

    def _child(self, child: Span, begin: int, end: int) -> Item:
        if child.kind == "checkpoint":
            return Checkpointed(child, tuple(self._items(child, begin, end)))
        if child.kind == "function":
            self.wholeness.check_function(child)
            return FunctionCall(child, self._made_in(child))
        fallback = self.traced.fallback(child.path)
        whole = (self.keep_modules or fallback is not None) and begin <= child.begin and child.end < end
        if whole and (child.path, child.nth_call) not in self.taken_apart and self.wholeness.runs_alone(child):
            return WholeCall(child, self._made_in(child), self._shapes_to_check(child))
        if fallback is not None:
            raise SplitError(self.wholeness.why_not_whole(child, fallback))
        return self._piece(child, begin, end)

    def _shapes_to_check(self, span: Span) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        if not decides_about_sizes(self.traced, span) and self.traced.fallback(span.path) is None:
            return ()
        specs = {index: self.traced.steps[index].spec for index in sorted(self._made_in(span))}
        return tuple(
            (index, tuple(dim if isinstance(dim, int) else Size(dim) for dim in spec.shape))
            for index, spec in specs.items()
            if spec is not None and spec.symbols <= self.traced.dims.keys()
        )

    def _made_in(self, span: Span) -> frozenset[int]:
        return frozenset(index for index in span.result.refs if self.traced.steps[index].tick >= span.begin)
