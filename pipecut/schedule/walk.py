"""Walk a plan in an order that its dependencies allow, every message meeting its receiver.

A send and its receive happen together, when both ranks have reached them: nothing is buffered. So a plan that can be
walked to its end cannot deadlock, whatever the network buffers, and one that cannot is stuck at known places. Lowering,
the simulator, the drawings and the proof go through a plan here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import PlanError
from .action import NEIGHBOUR, RECEIVES, SENDS, TRANSFERS, WHOLE_STAGE, Action, Op
from .plan import Plan
from .rules import GIVES

Key = tuple[Op, int, int | None]  # op, stage and peer, as they stand in an Action
MEETINGS = TRANSFERS | {Op.REDUCE_TIES}  # the actions that a rank does together with others


class Entry(NamedTuple):
    """The needs and effects of one kind of action, each the offset of the flag of microbatch 0."""

    needs: tuple[int, ...]
    fills: tuple[int, ...]
    message: int = -1  # of a transfer: the number of its message for microbatch 0, the same at both ends
    other: int = -1  # of a transfer: the rank at the other end


class Ledger:
    """The rules for one plan as numbers, so that they are quick to ask.

    There is a flag per microbatch for everything that can be done, such as "the forward of stage 3" or "the gradient of
    stage 4 for stage 3 has arrived". An entry has the flags that an action needs and those that it sets. With
    transfers, a value of another rank is needed as a message, otherwise directly; with `local` a plan without transfers
    is asked only for the needs within its ranks.
    """

    def __init__(self, plan: Plan, *, local: bool = False) -> None:
        self.microbatches = plan.microbatches
        self.offsets: dict[tuple[Op, int, int | None], int] = {}
        self.entries: dict[Key, Entry] = {}
        by_message = plan.has_transfers
        flow, placement = plan.dataflow, plan.placement
        for stage in range(plan.stages):
            here = placement.rank_of[stage]
            for op, gifts in GIVES.items():
                needs = [
                    self.offset(gift, other)
                    for gift, other in flow.needs(op, stage)
                    if placement.rank_of[other] == here or not (by_message or local)
                ]
                if by_message:
                    received = flow.receives(op, stage, placement)
                    needs += [self.offset(arrival, stage, other) for arrival, other in received]
                self.entries[op, stage, None] = Entry(tuple(needs), tuple(self.offset(gift, stage) for gift in gifts))
        if by_message:
            for stage in range(plan.stages):
                self._add_messages(plan, stage)
        self.done = bytearray(len(self.offsets) * plan.microbatches)

    def _add_messages(self, plan: Plan, stage: int) -> None:
        """Enter the messages that a stage sends, at both ends."""
        flow, placement = plan.dataflow, plan.placement
        for op in (Op.FORWARD, Op.BACKWARD_INPUT):
            for send, other in flow.messages(op, stage, placement):
                receive = Op.RECV_F if send is Op.SEND_F else Op.RECV_B
                made = send is Op.SEND_B or (stage, other) in flow.activations
                needs = (self.offset(op, stage),) if made else ()
                message, arrival = self.offset(send, stage, other), self.offset(receive, other, stage)
                sender, receiver = placement.rank_of[stage], placement.rank_of[other]
                self.entries[_key(send, stage, other)] = Entry(needs, (message,), message, receiver)
                self.entries[_key(receive, other, stage)] = Entry((), (arrival,), message, sender)

    def offset(self, op: Op, stage: int, other: int | None = None) -> int:
        """Return the offset of the flags of one effect of an op at a stage."""
        return self.offsets.setdefault((op, stage, other), len(self.offsets) * self.microbatches)

    def ready(self, action: Action) -> bool:
        """Return True if all inputs of a computation or a transfer are available."""
        needs = self.entries[action.op, action.stage, action.peer].needs
        return all(self.done[offset + (action.microbatch or 0)] for offset in needs)

    def is_done(self, action: Action) -> bool:
        """Return True if a computation or a transfer has been done."""
        fills = self.entries[action.op, action.stage, action.peer].fills
        return any(self.done[offset + (action.microbatch or 0)] for offset in fills)

    def note(self, action: Action, flag: int = 1) -> None:
        """Note that a computation or a transfer is done, or with 0 that it is not."""
        for offset in self.entries[action.op, action.stage, action.peer].fills:
            self.done[offset + (action.microbatch or 0)] = flag


def _key(op: Op, stage: int, other: int) -> Key:
    return op, stage, None if other == stage + NEIGHBOUR[op] else other


class Walk:
    """A walk through a plan: iterate to get (rank, action); then `stuck` has the ranks that could not go on.

    The ranks take turns, one action each, in ascending order: the order is the same in every run. The two ends of a
    message come one after the other, the send first.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rows = tuple(map(tuple, plan.actions))
        self.places = [0] * len(plan.actions)  # the next slot of each rank
        self._messages: list[int | None] = [None] * len(plan.actions)  # the message that each rank waits in
        self._ledger = Ledger(plan)
        unknown = first_unknown(plan, self._ledger)
        if unknown is not None:
            rank, slot = unknown
            raise PlanError(
                f"The plan '{plan.name}' cannot run: rank {rank} cannot do {plan.actions[rank][slot]} (slot {slot}). "
                "Call plan.validate() for the reason."
            )

    @property
    def stuck(self) -> dict[int, int]:
        """Rank -> the slot that it could not do, for every rank that did not come to its end."""
        rows = self.plan.actions
        return {rank: place for rank, place in enumerate(self.places) if place < len(rows[rank])}

    def check_finished(self, *, complete: bool = True) -> None:
        """Raise if something could not be done or, with `complete`, was missing."""
        plan = self.plan
        for rank, slot in self.stuck.items():
            raise PlanError(
                f"The plan '{plan.name}' cannot run past {plan.actions[rank][slot]} on rank {rank} (slot {slot}). "
                "Call plan.validate() for the reason."
            )
        forward = {Op.FORWARD, Op.SEND_F, Op.RECV_F}
        wanted = sum(plan.training or op in forward for op, _, _ in self._ledger.offsets)
        if complete and self._ledger.done.count(1) != wanted * plan.microbatches:
            raise PlanError(f"The plan '{plan.name}' is not complete. Call plan.validate() to see what is missing.")

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        rows, places, messages = self.rows, self.places, self._messages
        entries, done = self._ledger.entries, self._ledger.done
        live = [rank for rank, row in enumerate(rows) if row]
        moved = True
        while moved:
            moved = False
            for rank in live:
                if messages[rank] is not None:
                    continue  # it goes on when the others of the message have arrived
                row, place = rows[rank], places[rank]
                if place == len(row):
                    continue
                action = row[place]
                if action is None:
                    places[rank] = place + 1
                    moved = True
                    continue
                stage, op, microbatch, peer, parts = action
                entry = entries.get((op, stage, peer))
                if entry is None:
                    if op is Op.REDUCE_TIES:
                        for each in self._sum_of_tie(rank, action):
                            moved = True
                            yield each
                    elif not parts or self._do_parts(parts):
                        places[rank] = place + 1
                        moved = True
                        yield rank, action
                    continue
                needs, fills, message, other = entry
                number = microbatch or 0  # it has one: `first_unknown` has found none without
                for offset in needs:
                    if not done[offset + number]:
                        break
                else:
                    if done[fills[0] + number]:
                        continue  # done twice: such a rank does not go on
                    if message >= 0:
                        message += number
                        if messages[other] != message:
                            messages[rank] = message
                            continue
                        end = rows[other][places[other]]
                        assert end is not None  # it waits in the message
                        self._ledger.note(end)
                        messages[other] = None
                        places[other] += 1
                        if op in RECEIVES:
                            yield other, end
                    for offset in fills:
                        done[offset + number] = 1
                    places[rank] = place + 1
                    moved = True
                    yield rank, action
                    if op in SENDS and end is not None:
                        yield other, end
            live = [rank for rank in live if places[rank] < len(rows[rank])]

    def _do_parts(self, parts: tuple[Action, ...]) -> bool:
        """Do the parts of an overlap one after the other, all or none."""
        for number, part in enumerate(parts):
            if not self._ledger.ready(part) or self._ledger.is_done(part):
                for before in parts[:number]:
                    self._ledger.note(before, 0)
                return False
            self._ledger.note(part)
        return True

    def _sum_of_tie(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """Let a rank reach the sum of a tie; it happens on all its ranks once the last of them arrives."""
        message, ranks = -1 - (action.microbatch or 0), self.ranks_of(rank, action)
        self._messages[rank] = message
        if any(self._messages[each] != message for each in ranks):
            return []
        ends: list[tuple[int, Action]] = []
        for each in ranks:
            end = self.rows[each][self.places[each]]
            assert end is not None  # it waits in the sum
            ends.append((each, end))
            self._messages[each] = None
            self.places[each] += 1
        return ends

    def ranks_of(self, rank: int, action: Action) -> tuple[int, ...]:
        """Return all ranks on which an action of a rank happens at once."""
        if action.op is Op.REDUCE_TIES:
            return self.plan.ranks_of_tie(action.microbatch or 0)
        other = self._ledger.entries[action.op, action.stage, action.peer].other if action.op in TRANSFERS else rank
        return (rank,) if other == rank else (rank, other)


class MessageWalk:
    """A walk through messages alone, as if all computations were done: quick, and blind to faults in their order.

    The messages of each rank are numbers, the same at both ends; the sum of tie n is -1 - n. After `run`, `places` has
    the number of messages that each rank could do.
    """

    def __init__(self, plan: Plan, messages: list[list[int]], peers: list[list[int]]) -> None:
        self.plan, self.messages, self.peers = plan, messages, peers
        self.places = [0] * len(messages)

    def at(self, rank: int) -> int | None:
        """Return the message that a rank has reached."""
        place = self.places[rank]
        return self.messages[rank][place] if place < len(self.messages[rank]) else None

    def ranks_of(self, rank: int, place: int) -> tuple[int, ...]:
        """Return the ranks that take part in one of a rank's messages."""
        message = self.messages[rank][place]
        return (rank, self.peers[rank][place]) if message >= 0 else self.plan.ranks_of_tie(-1 - message)

    def run(self) -> None:
        """Let everything happen that can."""
        messages, peers, places = self.messages, self.peers, self.places
        turns = list(range(len(messages)))
        while turns:
            rank = turns.pop()
            queue, its_peers, place = messages[rank], peers[rank], places[rank]
            while place < len(queue):
                message = queue[place]
                if message < 0:
                    if not self._sum_of_tie(rank, place, turns):
                        break
                    place += 1
                    continue
                peer = its_peers[place]
                there = places[peer]
                if there == len(messages[peer]) or messages[peer][there] != message:
                    break
                places[peer] = there + 1
                turns.append(peer)
                place += 1
                places[rank] = place

    def _sum_of_tie(self, rank: int, place: int, turns: list[int]) -> bool:
        ranks = self.ranks_of(rank, place)
        if any(self.at(each) != self.messages[rank][place] for each in ranks):
            return False
        for each in ranks:
            self.places[each] += 1
            turns.append(each)
        return True


def first_unknown(plan: Plan, ledger: Ledger) -> tuple[int, int] | None:
    """Return rank and slot of the first action with a stage, microbatch, peer or rank that the plan does not have."""
    entries, microbatches = ledger.entries, plan.microbatches
    stages_of = plan.placement.stages_of
    for rank, row in enumerate(plan.actions):
        here = set(stages_of[rank])
        for slot, action in enumerate(row):
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
                    return rank, slot
    return None
