"""Big plans as arrays: lowered, proven and simulated with all ranks going ahead together.

A plan of ten million actions takes minutes if they are looked at one by one. Here each round takes the next action of
every rank at once, so that a plan takes as many rounds as its longest rank has actions, and a few more. This is for
plans that are made of codes, whose stages feed the next and nothing else; the others go through `Walk`, which this has
to agree with. And it only ever says that a plan is right: one that may not be goes through `Walk` and the validator
too, which say why.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .action import (
    MOST_NUMBERS,
    MOST_STAGES,
    NEIGHBOUR,
    NUMBER_BITS,
    OP_NUMBERS,
    OP_SHIFT,
    STAGE_SHIFT,
    Action,
    CodedRow,
    Op,
    first_code,
)
from .plan import Plan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_F, _I, _W, _B, _SEND_F, _RECV_F, _SEND_B, _RECV_B = (
    OP_NUMBERS[op]
    for op in (
        Op.FORWARD,
        Op.BACKWARD_INPUT,
        Op.BACKWARD_WEIGHT,
        Op.FULL_BACKWARD,
        Op.SEND_F,
        Op.RECV_F,
        Op.SEND_B,
        Op.RECV_B,
    )
)
_KNOWN = {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD, *NEIGHBOUR}
_FLAGS = 5  # for each stage and microbatch: forward, input gradient, weight gradient, activation and gradient received
_ARRIVED_F, _ARRIVED_B = 3, 4


def codes_of(row: Sequence[Action | None]) -> Ints:
    """Return the codes of a row that is made of them."""
    assert isinstance(row, CodedRow)
    return np.frombuffer(row.codes, dtype=np.int64)


class Lockstep:
    """The columns of a plan, by rank: slots of computations, flags of what is done and where."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.count, self.stages = plan, plan.microbatches, plan.stages
        self.rank_of = np.array(plan.placement.rank_of)
        lengths = [len(row) for row in plan.actions]
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        # By flag: the slot at which it is set, counted through all ranks; -1 if it is not.
        self.slots = np.full(_FLAGS * self.stages * self.count, -1, dtype=np.int64)

    def columns(self, rank: int) -> tuple[Ints, Ints, Ints]:
        """Return op, stage and number of a rank's actions."""
        codes = codes_of(self.plan.actions[rank])
        return codes >> OP_SHIFT, codes >> STAGE_SHIFT & MOST_STAGES, (codes & MOST_NUMBERS) - 1

    def flag(self, kind: int | Ints, stage: Ints, number: Ints) -> Ints:
        """Return the index of a flag."""
        return (kind * self.stages + stage) * self.count + number

    def note_slots(self) -> bool:
        """Note where everything is done; return False for an action that is not of its rank, unknown, or repeated."""
        for rank, row in enumerate(self.plan.actions):
            op, stage, number = self.columns(rank)
            peers = codes_of(row) >> NUMBER_BITS & MOST_STAGES
            if len(row) and (
                op.min() < 0
                or peers.any()
                or stage.max() >= self.stages
                or number.min() < 0
                or number.max() >= self.count
                or (self.rank_of[stage] != rank).any()
                or not self._note(rank, op, stage, number)
            ):
                return False
        return True

    def _note(self, rank: int, op: Ints, stage: Ints, number: Ints) -> bool:
        slots = np.arange(self.starts[rank], self.starts[rank + 1])
        kinds = {_F: (0,), _I: (1,), _W: (2,), _B: (1, 2), _RECV_F: (_ARRIVED_F,), _RECV_B: (_ARRIVED_B,)}
        for each, given in kinds.items():
            chosen = np.flatnonzero(op == each)
            for kind in given:
                flags = self.flag(kind, stage[chosen], number[chosen])
                if (self.slots[flags] >= 0).any():
                    return False
                self.slots[flags] = slots[chosen]
                if (self.slots[flags] != slots[chosen]).any():
                    return False  # twice in this row
        return True

    def is_in_order(self) -> bool:
        """Return True if all is there, each after what it needs on its own rank."""
        wanted = self.slots.reshape(_FLAGS, self.stages, self.count)
        backward = 3 if self.plan.training else 1
        if (wanted[:backward] < 0).any():
            return False
        for rank in range(len(self.plan.actions)):
            op, stage, number = self.columns(rank)
            slots = np.arange(self.starts[rank], self.starts[rank + 1])
            for needs in (self._local_need(op, stage, number), self._arrival_need(op, stage, number)):
                chosen = np.flatnonzero(needs >= 0)
                found = self.slots[needs[chosen]]
                if ((found < 0) | (found >= slots[chosen])).any():
                    return False
        return True

    def _local_need(self, op: Ints, stage: Ints, number: Ints) -> Ints:
        """Return the flag of the own rank that each action needs: a send its value, a backward its forward."""
        kind = np.full(16, -1)
        kind[[_I, _B, _SEND_F]] = 0
        kind[[_W, _SEND_B]] = 1
        needed = kind[op]
        return np.where(needed >= 0, self.flag(needed, stage, number), -1)

    def _arrival_need(self, op: Ints, stage: Ints, number: Ints) -> Ints:
        """Return the flag of the neighbouring stage that each computation needs: as a message, if there are any."""
        kind, step = np.full(16, -1), np.zeros(16, dtype=np.int64)
        kind[[_F, _I, _B]] = 0, 1, 1
        step[[_F, _I, _B]] = -1, 1, 1
        needed, other = kind[op], stage + step[op]
        exists = (needed >= 0) & (other >= 0) & (other < self.stages)
        other = np.clip(other, 0, self.stages - 1)
        here = self.rank_of[stage] == self.rank_of[other]
        if not self.plan.has_transfers:
            return np.where(exists & here, self.flag(needed, other, number), -1)
        message = np.where(needed == 0, _ARRIVED_F, _ARRIVED_B)
        local = self.flag(needed, other, number)
        return np.where(exists, np.where(here, local, self.flag(message, stage, number)), -1)

    def messages_meet(self) -> bool:
        """Return True if all messages are met, each rank doing its own in order and nothing being buffered."""
        messages, peers = [], []
        for rank in range(len(self.plan.actions)):
            op, stage, number = self.columns(rank)
            chosen = np.flatnonzero(op >= _SEND_F)
            op, stage, number = op[chosen], stage[chosen], number[chosen]
            other = stage + np.where((op == _SEND_F) | (op == _RECV_B), 1, -1)
            if len(other) and (other.min() < 0 or other.max() >= self.stages):
                return False
            maker = np.where((op == _SEND_F) | (op == _SEND_B), stage, other)
            backward = ((op == _SEND_B) | (op == _RECV_B)).astype(np.int64)
            messages.append(self.flag(backward, maker, number))  # a message is known by the flag of what makes it
            peers.append(self.rank_of[other].astype(np.int32))
        return self._follow_a_walk(messages) or _meet_in_turn(messages, peers)

    def _follow_a_walk(self, messages: list[Ints]) -> bool:
        """Return True if every rank has its messages in the order in which a walk of the computations makes them.

        Then the first one that is left can always be done. It is the order that lowering gives, and takes no longer to
        check if messages go round through all ranks, where few of them can be done at a time.
        """
        rows = [codes[codes >> OP_SHIFT < _SEND_F] for codes in map(codes_of, self.plan.actions)]
        bare = Lockstep(self.plan.with_actions(CodedRow(array("q", row.tobytes())) for row in rows))
        rounds = _rounds_of_walk(bare) if bare.note_slots() else None
        if rounds is None:
            return False
        ranks, ends = len(rows), np.zeros(2 * self.stages * self.count, dtype=np.int8)
        for row in messages:
            makers = bare.slots[row]
            order = rounds[makers] * ranks + self.rank_of[row // self.count % self.stages]
            if (makers < 0).any() or (np.diff(order) <= 0).any():
                return False
            ends[row] += 1  # none is twice in a row, and each can be on two ranks only
        return not (ends == 1).any()


def _meet_in_turn(messages: list[Ints], peers: list[npt.NDArray[np.int32]]) -> bool:
    """Return True if all messages are done, if every rank goes ahead whenever the head of its peer is the same."""
    lengths = [len(row) + 1 for row in messages]  # with a mark at the end
    ends = np.cumsum(lengths) - 1
    places = np.append(0, ends[:-1] + 1)
    every = np.concatenate([np.append(row, -1 - rank) for rank, row in enumerate(messages)])
    others = np.concatenate([np.append(row, rank) for rank, row in enumerate(peers)])
    while True:
        heads = every[places]
        met = (heads[others[places]] == heads) & (heads >= 0)
        if not met.any():
            return bool((places == ends).all())
        places += met


def goes_together(plan: Plan) -> bool:
    """Return True if a plan is one for this file: of codes without sharding and sums, and a chain."""
    flow = plan.dataflow
    return (
        all(isinstance(row, CodedRow) for row in plan.actions)
        and not plan.ops - _KNOWN
        and not flow.root_inputs
        and flow.activations == flow.gradients == frozenset((stage, stage + 1) for stage in range(flow.stages - 1))
    )


def is_proven(plan: Plan) -> bool:
    """Return True if a plan with its messages is complete, in order and free of deadlock."""
    if not plan.has_transfers:
        return False
    steps = Lockstep(plan)
    return steps.note_slots() and steps.is_in_order() and steps.messages_meet()


def add_transfers_together(plan: Plan) -> Plan | None:
    """Return the plan with its messages, the same as one action after the other would give; None if it cannot run."""
    steps = Lockstep(plan)
    if not (steps.note_slots() and steps.is_in_order()):
        return None
    rounds = _rounds_of_walk(steps)
    return None if rounds is None else plan.with_actions(_merged(steps, rounds))


def _rounds_of_walk(steps: Lockstep) -> Ints | None:
    """Return the round of a walk in which each computation is done; None if the ranks wait for each other.

    A walk goes round after round through the ranks: what an earlier rank does in a round is done when its turn comes,
    of a later rank only what it did in the round before.
    """
    makers, later = _makers(steps)
    rounds = ends_of(steps.starts, makers, np.where(later, 0.0, -1.0), np.ones(len(makers)))
    return None if rounds is None else rounds.astype(np.int64)


def _makers(steps: Lockstep) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return for every computation the one of another rank that it needs, or -1; and True if that rank comes after."""
    makers, later = [], []
    for rank in range(len(steps.plan.actions)):
        op, stage, number = steps.columns(rank)
        step = np.where(op == _F, -1, 1)
        other = np.clip(stage + step, 0, steps.stages - 1)
        there = steps.rank_of[other]
        needs = (op != _W) & (other != stage) & (there != rank)
        flags = steps.flag(np.where(op == _F, 0, 1), other, number)
        makers.append(np.where(needs, steps.slots[flags], -1))
        later.append(needs & (there > rank))
    return np.concatenate(makers), np.concatenate(later)


def ends_of(starts: Ints, makers: Ints, travels: Floats, durations: Floats) -> Floats | None:
    """Return the end of every computation; None if the ranks wait for each other.

    The computations of rank r are those from `starts[r]` on. One begins when its rank is free, and the end of its maker
    with the travel from there is past.
    """
    total = len(makers)
    nothing, never = total, total + 1  # stand for a maker: of a computation without one, and after the last
    ends = np.full(total + 2, -1.0)
    ends[nothing] = 0.0
    makers = np.append(np.where(makers < 0, nothing, makers), never)
    travels = np.append(np.where(makers[:-1] == nothing, -np.inf, travels), 0.0)
    stops, free = starts[1:], np.zeros(len(starts) - 1)
    at = np.where(starts[:-1] < stops, starts[:-1], total)
    while True:
        arrivals = ends[makers[at]]
        ready = np.flatnonzero(arrivals >= 0)
        if not len(ready):
            return ends[:total] if (at == total).all() else None
        here = at[ready]
        done = np.maximum(free[ready], arrivals[ready] + travels[here]) + durations[here]
        ends[here] = free[ready] = done
        here += 1
        at[ready] = np.where(here < stops[ready], here, total)


def _merged(steps: Lockstep, rounds: Ints) -> list[CodedRow]:
    """Return the rows with a send after every computation that has one, and receives at the same moment."""
    plan = steps.plan
    ranks = len(plan.actions)
    keys: list[list[Ints]] = [[] for _ in range(ranks)]
    codes: list[list[Ints]] = [[] for _ in range(ranks)]
    sends = {_F: (Op.SEND_F, Op.RECV_F), _I: (Op.SEND_B, Op.RECV_B), _B: (Op.SEND_B, Op.RECV_B)}
    for rank, row in enumerate(plan.actions):
        op, stage, number = steps.columns(rank)
        key = 2 * (rounds[steps.starts[rank] : steps.starts[rank + 1]] * ranks + rank)
        keys[rank].append(key)
        codes[rank].append(codes_of(row))
        for held in plan.placement.stages_of[rank]:
            for each, (send, receive) in sends.items():
                other = held + NEIGHBOUR[send]
                if not 0 <= other < plan.stages or plan.placement.rank_of[other] == rank:
                    continue
                chosen = np.flatnonzero((op == each) & (stage == held))
                peer = plan.placement.rank_of[other]
                for end, its_stage, its_op in ((rank, held, send), (peer, other, receive)):
                    keys[end].append(key[chosen] + 1)
                    codes[end].append(first_code(its_stage, its_op) + number[chosen])
    rows = []
    for own_keys, own_codes in zip(keys, codes, strict=True):
        order = np.argsort(np.concatenate(own_keys), kind="stable")
        made = array("q")
        made.frombytes(np.concatenate(own_codes)[order].tobytes())
        rows.append(CodedRow(made))
    return rows
