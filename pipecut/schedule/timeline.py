"""Timelines: the start and the end of actions, simulated or executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .action import Action


class Span(NamedTuple):
    """One action of one rank, from start to end."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks, by rank and start."""

    name: str
    ranks: int
    spans: tuple[Span, ...] = field(repr=False)
    unit: str = ""  # of the times, as in "ms"; empty where they are relative

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, in order."""
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    @cached_property
    def start(self) -> float:
        """The start of the first span."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """The end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)
