"""What the simulator takes down, computation by computation, in an order in which they can run."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from .action import Action


class Wait(IntEnum):
    """What a computation came to wait for last."""

    RANK = 0  # its rank, busy with what comes before it
    FORWARD = 1  # an activation of another rank
    BACKWARD = 2  # a gradient of another rank


@dataclass(frozen=True)
class Record:
    """The computations of a run, numbered as they were taken down; those of one rank in the order they ran.

    Flat arrays, since a plan may have a million computations and most questions concern a few of these columns.
    """

    ranks: array[int] = field(default_factory=lambda: array("l"))
    actions: list[Action] = field(default_factory=list)
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    before: array[int] = field(default_factory=lambda: array("l"))  # the computation whose end let this start, or -1
    waits: array[int] = field(default_factory=lambda: array("b"))  # a Wait

    def add(self, rank: int, action: Action, start: float, end: float, before: int, wait: int) -> None:
        """Take down one computation."""
        self.ranks.append(rank)
        self.actions.append(action)
        self.starts.append(start)
        self.ends.append(end)
        self.before.append(before)
        self.waits.append(wait)

    def by_rank(self, ranks: int) -> list[list[int]]:
        """The numbers of each rank's computations, in order."""
        rows: list[list[int]] = [[] for _ in range(ranks)]
        for number, rank in enumerate(self.ranks):
            rows[rank].append(number)
        return rows
