"""What each of a few equal pieces of time is mostly spent on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..timeline import Span

MOMENT = 1e-9  # of a cell: what is shorter is taken for a matter of rounding


@dataclass
class Use:
    """What the spans under one letter have of a cell."""

    total: float = 0.0
    most: float = -1.0
    span: Span | None = None  # the one that has most


def owners(row: Sequence[Span], cells: int, step: float, letter: Callable[[Span], str]) -> list[Span | None]:
    """The span that stands for each cell of `step` time: the longest under the letter that has most; None if idle.

    A transfer, or what else is no computation, stands where no computation does.
    """
    in_front = _owners([span for span in row if span.action.is_compute], cells, step, letter)
    behind = _owners([span for span in row if not span.action.is_compute], cells, step, letter)
    return [front or back for front, back in zip(in_front, behind, strict=True)]


def _owners(row: Iterable[Span], cells: int, step: float, letter: Callable[[Span], str]) -> list[Span | None]:
    uses: list[dict[str, Use]] = [{} for _ in range(cells)]
    for span in row:
        for cell, share in _shares(span, cells, step):
            use = uses[cell].setdefault(letter(span), Use())
            use.total += share
            if share > use.most + MOMENT:
                use.most, use.span = share, span
    return [_owner(use) for use in uses]


def _shares(span: Span, cells: int, step: float) -> Iterator[tuple[int, float]]:
    """The cells that a span has part in, and how much of each."""
    start, end = span.start / step, span.end / step
    first = min(int(start + MOMENT), cells - 1)
    yield first, max(min(end, first + 1) - start, 0.0)
    for cell in range(first + 1, cells):
        if end - cell < MOMENT:
            return
        yield cell, min(end - cell, 1.0)


def _owner(uses: dict[str, Use]) -> Span | None:
    """Who has most of a cell; nobody if it is mostly idle, but a moment alone in a cell is shown."""
    spent = sum(use.total for use in uses.values())
    if not uses or MOMENT < spent < 0.5 - MOMENT:
        return None
    return max(uses.values(), key=lambda use: use.total).span
