"""The longest chain of computations: what has to become quicker for the whole to become quicker."""

from __future__ import annotations

from .record import Record
from .timeline import Span


def critical_path(record: Record) -> tuple[Span, ...]:
    """From the first computation to the one that ends last, each let start by the end of the one before it.

    Two that follow each other are on one rank, or a message goes from the rank of the first to that of the second; then
    the second starts when that message arrives.
    """
    if not record.actions:
        return ()
    number = max(range(len(record.ends)), key=record.ends.__getitem__)
    path = []
    while number >= 0:
        path.append(Span(record.ranks[number], record.actions[number], record.starts[number], record.ends[number]))
        number = record.before[number]
    return tuple(reversed(path))
