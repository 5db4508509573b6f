"""Sizes of a module's results, as expressions of the sizes that are known: read off from runs of several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KnownSize:
    """A size in each run, and what it is called in the trace: a number, or a symbolic one."""

    values: tuple[int, ...]
    name: Any


def size_from(values: Sequence[int], known: Sequence[KnownSize]) -> Any:
    """The size that had these values in the runs, from known ones; None where nothing simple explains it.

    >>> batch = KnownSize((4, 5, 6), 4)
    >>> size_from((8, 8, 8), [batch]), size_from((12, 15, 18), [batch]), size_from((7, 8, 9), [batch])
    (8, 12, 7)
    >>> size_from((3, 1, 4), [batch]) is None
    True
    """
    first = values[0]
    if all(value == first for value in values):
        return first
    for size in known:
        if size.values == tuple(values):
            return size.name
    for size in known:
        times, rest = divmod(first, size.values[0]) if size.values[0] else (0, 1)
        if not rest and all(value == times * own for value, own in zip(values, size.values, strict=True)):
            return times * size.name
        more = first - size.values[0]
        if all(value == own + more for value, own in zip(values, size.values, strict=True)):
            return size.name + more
    for one, other in itertools.combinations(known, 2):
        products = [mine * theirs for mine, theirs in zip(one.values, other.values, strict=True)]
        times, rest = divmod(first, products[0]) if products[0] else (0, 1)
        if not rest and all(value == times * product for value, product in zip(values, products, strict=True)):
            return times * one.name * other.name
    return None
