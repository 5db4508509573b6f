"""What a rank waits for while it does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .record import Record, Wait


class Idle(NamedTuple):
    """The idle time of one rank, by its cause. With the rank's busy time it sums up to the makespan."""

    start: float  # before the rank's first computation
    forward: float  # an activation is not computed yet, or not sent
    backward: float  # a gradient is not computed yet, or not sent
    transfer: float  # what the rank waits for is on the wire
    end: float  # after the rank's last computation

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def idle_time(record: Record, numbers: Sequence[int], makespan: float) -> Idle:
    """The idle time of the rank that ran the computations with these numbers.

    A rank that waits for several values waits for the one that comes last.
    """
    if not numbers:
        return Idle(0.0, 0.0, 0.0, 0.0, end=makespan)
    starts, ends = record.starts, record.ends
    forward = backward = transfer = 0.0
    free = starts[numbers[0]]
    for number in numbers:
        gap = starts[number] - free
        free = ends[number]
        if gap <= 0:
            continue
        wait, before = record.waits[number], record.before[number]
        # What has kept the rank without a message is the sum of a tie: some gradient is not there yet.
        wire = 0.0 if wait == Wait.RANK else min(gap, starts[number] - (ends[before] if before >= 0 else 0.0))
        transfer += wire
        if wait == Wait.FORWARD:
            forward += gap - wire
        else:
            backward += gap - wire
    return Idle(starts[numbers[0]], forward, backward, transfer, makespan - free)
