"""One reason why a plan cannot run, and where."""

from __future__ import annotations

from dataclasses import dataclass

from ..action import Action


@dataclass(frozen=True)
class Fault:
    """What is wrong with one action of a rank. For an action that is missing, `step` is the end of the rank's list.

    With `cause` False there is nothing wrong with the action itself: it waits for one that cannot run.
    """

    rank: int
    step: int
    action: Action
    problem: str
    cause: bool = True

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}, {self.action}: {self.problem}"
