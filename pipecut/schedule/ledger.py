"""What every action of a plan needs and leaves behind, as numbers: `rules` made quick to ask.

A slot is a run of flags, one a microbatch: "the forward of stage 3 is done", "the gradient of stage 4 for stage 3 has
arrived". An entry says which slots an action needs and which it fills.
"""

from __future__ import annotations

from typing import NamedTuple

from .action import NEIGHBOUR, Action, Op
from .plan import Plan
from .rules import GIVES

Key = tuple[Op, int, int | None]  # op, stage and peer, as they stand in an Action


class Entry(NamedTuple):
    """The slots of one kind of action, each the index of the flag of microbatch 0."""

    needs: tuple[int, ...]
    fills: tuple[int, ...]


class Ledger:
    """The entries of a plan. With transfers, what comes from another rank is needed as a message, otherwise directly.

    With `local` a plan without transfers is asked only what its ranks need of themselves.
    """

    def __init__(self, plan: Plan, *, local: bool = False) -> None:
        self.microbatches = plan.microbatches
        self.slots: dict[tuple[Op, int, int | None], int] = {}
        self.entries: dict[Key, Entry] = {}
        by_message = plan.has_transfers
        flow, placement = plan.dataflow, plan.placement
        for stage in range(plan.stages):
            here = placement.rank_of[stage]
            for op, gifts in GIVES.items():
                needs = [
                    self.slot(gift, other)
                    for gift, other in flow.needs(op, stage)
                    if placement.rank_of[other] == here or not (by_message or local)
                ]
                if by_message:
                    received = flow.receives(op, stage, placement)
                    needs += [self.slot(arrival, stage, other) for arrival, other in received]
                self.entries[op, stage, None] = Entry(tuple(needs), tuple(self.slot(gift, stage) for gift in gifts))
        if by_message:
            for stage in range(plan.stages):
                self._add_messages(plan, stage)
        self.done = bytearray(len(self.slots) * plan.microbatches)

    def _add_messages(self, plan: Plan, stage: int) -> None:
        flow, placement = plan.dataflow, plan.placement
        for op in (Op.FORWARD, Op.BACKWARD_INPUT):
            for send, other in flow.messages(op, stage, placement):
                made = send is Op.SEND_B or (stage, other) in flow.activations
                needs = (self.slot(op, stage),) if made else ()
                self.entries[_key(send, stage, other)] = Entry(needs, (self.slot(send, stage, other),))
            for receive, other in flow.receives(op, stage, placement):
                self.entries[_key(receive, stage, other)] = Entry((), (self.slot(receive, stage, other),))

    def slot(self, op: Op, stage: int, other: int | None = None) -> int:
        """Where the flags are of what an op leaves at a stage."""
        return self.slots.setdefault((op, stage, other), len(self.slots) * self.microbatches)

    def ready(self, action: Action) -> bool:
        """Whether all is there that a computation or a transfer needs."""
        entry = self.entries[action.op, action.stage, action.peer]
        return all(self.done[slot + action.microbatch] for slot in entry.needs)  # type: ignore[operator]

    def is_done(self, action: Action) -> bool:
        """Whether a computation or a transfer has been done."""
        entry = self.entries[action.op, action.stage, action.peer]
        return any(self.done[slot + action.microbatch] for slot in entry.fills)  # type: ignore[operator]

    def note(self, action: Action, flag: int = 1) -> None:
        """Take down that a computation or a transfer is done, or with 0 that it is not."""
        for slot in self.entries[action.op, action.stage, action.peer].fills:
            self.done[slot + action.microbatch] = flag  # type: ignore[operator]


def _key(op: Op, stage: int, other: int) -> Key:
    return op, stage, None if other == stage + NEIGHBOUR[op] else other
