"""Programs without the operations that nobody needs any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from .program import Checkpointed, Item, Key, Operation, Piece, keys_in, used_by


class Droppable(Protocol):
    """Knows which steps do nothing but make their value."""

    def __contains__(self, index: int) -> bool: ...


def without_unused(program: Piece, wanted: Iterable[Key], droppable: Droppable) -> Piece:
    """A program without the droppable operations whose values are neither used in it nor wanted from it."""
    return replace(program, items=_kept(program.items, set(wanted), droppable))


def _kept(items: tuple[Item, ...], needed: set[Key], droppable: Droppable) -> tuple[Item, ...]:
    """The items that stay; `needed` grows by what these use, from the last item to the first."""
    kept: list[Item] = []
    for item in reversed(items):
        if isinstance(item, Operation) and item.step.index in droppable and item.step.index not in needed:
            continue
        if isinstance(item, Piece):
            item = replace(item, items=_kept(item.items, needed, droppable))
            kept += [item] if item.items else []
            continue
        needed |= used_by(item) | (keys_in(item.span.result) if isinstance(item, Checkpointed) else frozenset())
        kept.append(item)
    return tuple(reversed(kept))
