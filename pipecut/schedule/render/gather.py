"""Spans too narrow to be seen alone, gathered so that a picture of any plan stays small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..timeline import Span


def gathered(row: Iterable[Span], least: float) -> Iterator[list[Span]]:
    """The spans of a row, by start: alone from `least` time on, the shorter ones with their neighbours.

    Two groups of short spans start at least `least` apart, so a row has no more groups than fit in its time.
    """
    together: list[Span] = []
    for span in row:
        alone = span.end - span.start >= least
        if together and (alone or span.start - together[0].start >= least):
            yield together
            together = []
        if alone:
            yield [span]
        else:
            together.append(span)
    if together:
        yield together


def least_time(rows: Sequence[Sequence[Span]], first: float, most_groups: int) -> float:
    """`first`, doubled until the rows have no more than `most_groups` groups, or each row is down to one."""
    least = first
    extent = max((span.end for row in rows for span in row), default=0.0)
    while least <= extent and not _fits(rows, least, most_groups):
        least *= 2
    return least


def _fits(rows: Sequence[Sequence[Span]], least: float, most_groups: int) -> bool:
    left = most_groups
    for row in rows:
        for _ in gathered(row, least):
            left -= 1
            if left < 0:
                return False
    return True
