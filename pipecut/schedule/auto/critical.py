"""Which passes of timed rows keep a rank from ending sooner."""

from __future__ import annotations

from collections.abc import Sequence

from .problem import Row
from .timing import Clock

Place = tuple[int, int]  # rank and index in its row


def critical_places(clock: Clock, rows: Sequence[Row], starts: Sequence[float], rank: int) -> list[Place]:
    """The passes on the longest chain to the end of a rank that start when the pass before them in their row ends."""
    where = {number: (each, place) for each, row in enumerate(rows) for place, number in enumerate(row)}
    found = []
    at: Place | None = (rank, len(rows[rank]) - 1)
    while at is not None:
        row, place = rows[at[0]], at[1]
        number = row[place]
        before = row[place - 1] if place else None
        if before is not None and starts[number] - starts[before] - clock.lasts[before] <= 1e-9 * starts[number]:
            found.append(at)
            at = (at[0], place - 1)
        else:
            at = _maker(clock, number, where)
    return found


def _maker(clock: Clock, number: int, where: dict[int, Place]) -> Place | None:
    """Where the pass is for whose message a pass waited; None for what was there from the start."""
    slot = clock.needs[number]
    if slot == clock.nothing:
        return None
    block = (
        clock.nothing // 2
    )  # slots of forwards, then of input gradients, numbered as F and I are; B fills those of I
    return where[slot] if slot < block or slot in where else where[slot + 2 * block]
