"""Walks a plan in an order that its dependencies allow, every message meeting its receiver.

A send and its receive happen together, when both ranks have come to them: nothing is buffered. So a plan that can be
walked to its end cannot deadlock, whatever the network buffers, and one that cannot is stuck at known places.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

from ..errors import PlanError
from .action import NEIGHBOUR, TRANSFERS, WHOLE_STAGE, Action, Op
from .plan import Plan
from .rules import GIVES

# MERGED: What every action of a plan needs and leaves behind, as numbers: `rules` made quick to ask.
# MERGED:
# MERGED: A slot is a run of flags, one a microbatch: "the forward of stage 3 is done", "the gradient of stage 4
# MERGED: for stage 3 has
# MERGED: arrived". An entry says which slots an action needs and which it fills.


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


class Walk:
    """Iterate to get (rank, action) in order; afterwards `stuck` has the place of every rank that could not go on.

    The ranks take turns, one action each, in ascending order: the order is the same in every run. The two ends of a
    message come one after the other, the send first.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.places = [0] * len(plan.actions)  # the next step of each rank
        self._ledger = Ledger(plan)
        unknown = first_unknown(plan, self._ledger)
        if unknown is not None:
            rank, step = unknown
            raise PlanError(
                f"The plan '{plan.name}' cannot run: rank {rank} cannot do {plan.actions[rank][step]} (step {step}). "
                "plan.validate() tells why."
            )

    @property
    def stuck(self) -> dict[int, int]:
        """Rank -> the step it could not take, for every rank that did not come to its end."""
        rows = self.plan.actions
        return {rank: place for rank, place in enumerate(self.places) if place < len(rows[rank])}

    def check_finished(self, *, complete: bool = True) -> None:
        """Refuse a plan of which something could not be done, or, unless a part of a step will do, was missing."""
        plan = self.plan
        for rank, step in self.stuck.items():
            raise PlanError(
                f"The plan '{plan.name}' cannot run past {plan.actions[rank][step]} on rank {rank} (step {step}). "
                "plan.validate() tells why."
            )
        forward = {Op.FORWARD, Op.SEND_F, Op.RECV_F}
        wanted = sum(plan.training or op in forward for op, _, _ in self._ledger.slots)
        if complete and self._ledger.done.count(1) != wanted * plan.microbatches:
            raise PlanError(f"The plan '{plan.name}' is not complete. plan.validate() tells what is missing.")

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        rows, places = self.plan.actions, self.places
        entries, done = self._ledger.entries, self._ledger.done
        live = [rank for rank, row in enumerate(rows) if row]
        moved = True
        while moved:
            moved = False
            for rank in live:
                place = places[rank]
                row = rows[rank]
                if place == len(row):
                    continue
                action = row[place]
                if action is None:
                    places[rank] = place + 1
                    moved = True
                elif action.op in GIVES:
                    stage, op, microbatch, _, _ = action
                    needs, fills = entries[op, stage, None]
                    for slot in needs:
                        if not done[slot + microbatch]:  # type: ignore[operator]
                            break
                    else:
                        if done[fills[0] + microbatch]:  # type: ignore[operator]
                            continue  # done twice: such a rank does not go on
                        for slot in fills:
                            done[slot + microbatch] = 1  # type: ignore[operator]
                        places[rank] = place + 1
                        moved = True
                        yield rank, action
                else:
                    for other, its_action in self._together(rank, action):
                        places[other] += 1
                        moved = True
                        yield other, its_action
            live = [rank for rank in live if places[rank] < len(rows[rank])]

    def _together(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """What happens now, on every rank it takes; nothing, if one of them is not there yet."""
        if action.op in TRANSFERS:
            return self._message(rank, action)
        if action.op is Op.REDUCE_TIES:
            return self._sum_of_tie(action)
        if action.op is Op.OVERLAP_F_B and not self._take_parts(action):
            return []
        return [(rank, action)]

    def _take_parts(self, action: Action) -> bool:
        """Do the parts of an overlap one after the other, all or none."""
        taken: list[Action] = []
        for part in action.parts:
            if not self._ledger.ready(part) or self._ledger.is_done(part):
                for undone in taken:
                    self._ledger.note(undone, 0)
                return False
            self._ledger.note(part)
            taken.append(part)
        return True

    def _message(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """Both ends of a message, if the value is there and both ranks have come to it."""
        other = action.counterpart
        peer = self.plan.placement.rank_of[other.stage]
        if self._here(peer) != other:
            return []
        ends = [(rank, action), (peer, other)]
        if action.op in (Op.RECV_F, Op.RECV_B):
            ends.reverse()
        if not self._ledger.ready(ends[0][1]) or self._ledger.is_done(ends[0][1]):
            return []
        for _, end in ends:
            self._ledger.note(end)
        return ends

    def _sum_of_tie(self, action: Action) -> list[tuple[int, Action]]:
        """The sum of one tie on all ranks that hold it, if all have come to it."""
        meeting = []
        for rank in self.plan.ranks_of_tie(action.microbatch or 0):
            there = self._here(rank)
            if there is None or (there.op, there.microbatch) != (Op.REDUCE_TIES, action.microbatch):
                return []
            meeting.append((rank, there))
        return meeting

    def _here(self, rank: int) -> Action | None:
        row, place = self.plan.actions[rank], self.places[rank]
        return row[place] if place < len(row) else None


def first_unknown(plan: Plan, ledger: Ledger) -> tuple[int, int] | None:
    """Rank and step of the first action with a stage, a microbatch, a peer or a rank that the plan does not have."""
    entries, microbatches = ledger.entries, plan.microbatches
    stages_of = plan.placement.stages_of
    for rank, row in enumerate(plan.actions):
        here = set(stages_of[rank])
        for step, action in enumerate(row):
            if action is None:
                continue
            for stage, op, number, peer, _ in action.parts or (action,):
                if (op, stage, peer) in entries:
                    fits = number is not None and 0 <= number < microbatches
                elif op is Op.REDUCE_TIES:
                    fits = plan.dataflow.has_tie(number, stage)
                else:
                    fits = op in WHOLE_STAGE and number is None
                if not fits or stage not in here or (action.parts and op not in GIVES):
                    return rank, step
    return None


# MERGED: The garbage collector out of the way while a plan is made or read.
# MERGED:
# MERGED: Actions hold no reference cycles, but there are many of them: left on, the collector looks through all of
# MERGED: them again and
# MERGED: again, and takes as long as the work itself.


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def collector_paused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, run with the garbage collector off if it was on."""

    @functools.wraps(function)
    def paused(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return paused
