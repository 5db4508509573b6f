"""What a stage runs, as a tree of items: operations, whole module calls, and pieces of modules that are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from ..pipe_ir.traced import HERE, ConstantRef, Context, Ref, Size, Span, Step, Template

# A value that travels by name through generated code: what a step made, a symbolic dim, or the device (HERE).
Key: TypeAlias = int | sympy.Symbol | Any


@dataclass(frozen=True)
class Operation:
    """One traced operation."""

    step: Step

    @property
    def context(self) -> Context:
        return self.step.context


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
    """The items inside an item."""
    if isinstance(item, Piece):
        return item.items
    return item.body if isinstance(item, Checkpointed) else ()


def walk(items: tuple[Item, ...]) -> Iterator[Item]:
    """All items, the inner ones after the one that holds them."""
    for item in items:
        yield item
        yield from walk(body_of(item))


def defined_by(item: Item) -> frozenset[int]:
    """The values that an item makes."""
    if isinstance(item, Operation):
        return frozenset({item.step.index})
    if isinstance(item, WholeCall | FunctionCall):
        return item.makes
    return frozenset(index for inner in body_of(item) for index in defined_by(inner))


def used_by(item: Item) -> frozenset[Key]:
    """The values from outside that an item needs."""
    if isinstance(item, Operation):
        return keys_in((item.step.args, item.step.kwargs))
    if isinstance(item, WholeCall):
        return keys_in(item.span.args) | keys_in(tuple(shape for _, shape in item.shapes))
    if isinstance(item, FunctionCall):
        return keys_in(item.span.args)
    if isinstance(item, BufferUpdate):
        return frozenset({item.value})
    arguments = keys_in(item.span.args) if isinstance(item, Checkpointed) else frozenset()
    return arguments | used_by_items(body_of(item))


def used_by_items(items: tuple[Item, ...]) -> frozenset[Key]:
    """What a sequence of items needs from outside."""
    defined: set[Key] = set()
    used: set[Key] = set()
    for item in items:
        used |= used_by(item) - defined
        defined |= defined_by(item)
    return frozenset(used)


def keys_in(value: Any) -> frozenset[Key]:
    """The values that an argument refers to."""
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
