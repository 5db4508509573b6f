"""How much searching is done: so many passes placed or timed, and never longer than the clock allows.

The clock is that of the searching thread, so that other work on the machine changes nothing. The count follows from the
time that is given and from a modest speed of a machine, so that on most machines it is the count that ends a search,
and the result is the same every time.
"""

from __future__ import annotations

import time

DRAFTED = 200_000  # passes that are placed in a second by the rules
TIMED = 2_000_000  # passes of given rows that are timed in a second
COUNTED = 0.4  # the part of the given time that the counts may take
CLOCKED = 0.6  # the part after which nothing new is begun; the rest is for the proof and the report


class Budget:
    """What is left of a search."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.thread_time() + CLOCKED * seconds
        self.ended_by_clock = False

    def drafts(self, passes: int, part: float) -> int:
        """How many drafts of so many passes may be made in a part of the budget."""
        return int(COUNTED * part * self.seconds * DRAFTED / passes)

    def timings(self, passes: int, part: float) -> int:
        """How many rows of so many passes may be timed in a part of the budget."""
        return int(COUNTED * part * self.seconds * TIMED / passes)

    def is_over(self) -> bool:
        """Whether the clock ends the search."""
        self.ended_by_clock = self.ended_by_clock or time.thread_time() > self.deadline
        return self.ended_by_clock
