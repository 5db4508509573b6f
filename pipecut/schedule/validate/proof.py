"""The proof that a plan can run: all faults of each rank by itself, and of all ranks together.

No ranks may wait for each other in a circle, even if a send returns only when it is received.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import PlanError
from ...text import counted
from ..action import Action, Op
from ..plan import Plan, collector_paused
from ..plan_text import marked_grid
from ..rules import GIVES, dependencies
from ..walk import MessageWalk, Walk
from .order import Fault, PlanReading, order_faults, sharding_faults

_SHOWN = 20  # faults in one message; all of them are in the error's `faults`


@collector_paused
def find_faults(plan: Plan) -> list[Fault]:
    """Return everything that keeps a plan from running, causes first, by rank and slot; empty if it can run."""
    if plan.is_proven:
        return []
    reading = PlanReading(plan)
    faults = order_faults(plan, reading)
    faults += sharding_faults(plan, reading)
    faults += _deadlock_faults(plan, reading)
    return sorted(dict.fromkeys(faults), key=lambda fault: (not fault.cause, fault.rank, fault.slot))


def validate(plan: Plan) -> None:
    """Raise a PlanError that lists every fault, with the grid around the first, unless the plan can run."""
    faults = find_faults(plan)
    if not faults:
        return
    lines = [f"The plan '{plan.name}' cannot run: {counted(len(faults), 'fault')}."]
    lines += [f"  {fault}" for fault in faults[:_SHOWN]]
    if len(faults) > _SHOWN:
        lines.append(f"  ... and {len(faults) - _SHOWN} more, all in the error's `faults`.")
    first = faults[0]
    lines.append(marked_grid(plan.actions, first.rank, first.slot, first.action))
    raise PlanError("\n".join(lines), faults)


def _deadlock_faults(plan: Plan, reading: PlanReading) -> list[Fault]:
    """Return a fault for each rank that waits forever."""
    if plan.has_transfers or any(reading.messages):
        faults = _Messages(plan, reading).faults()
        if plan.has_transfers or faults:
            return faults
    return _circles(plan) if reading.known else []


class _Messages:
    """A walk through the messages and the sums of ties of a plan, and an explanation for each rank that is stuck.

    Computations count as done, so that one that is missing or too early, a fault of its own, hides no deadlock.
    """

    def __init__(self, plan: Plan, reading: PlanReading) -> None:
        self.plan, self.slots = plan, reading.message_slots
        self.walk = MessageWalk(plan, reading.messages, reading.message_peers)

    def faults(self) -> list[Fault]:
        """Walk, and return one fault for each rank that does not come to its end."""
        self.walk.run()
        stuck = [rank for rank in range(len(self.slots)) if self.walk.at(rank) is not None]
        waits = {rank: self._waits_for(rank) for rank in stuck}
        circle = _on_a_circle({rank: peer for rank, peer in waits.items() if self._is_to_come(rank, peer)})
        return [self._explain(rank, waits[rank], rank in circle) for rank in stuck]

    def _waits_for(self, rank: int) -> int:
        """Return the first rank that has not come to where this one waits."""
        ranks = sorted(self.walk.ranks_of(rank, self.walk.places[rank]))
        return next(peer for peer in ranks if self.walk.at(peer) != self.walk.at(rank))

    def _is_to_come(self, rank: int, peer: int) -> bool:
        """Return True if the other rank would take part, if it got there."""
        return self.walk.at(rank) in self._left(peer)

    def _left(self, rank: int) -> list[int]:
        return self.walk.messages[rank][self.walk.places[rank] :]

    def _explain(self, rank: int, peer: int, in_circle: bool) -> Fault:
        slot, action = self._slot(rank, self.walk.places[rank])
        if not self._is_to_come(rank, peer):
            problem = f"waits forever: rank {peer} has no other end for it from there on; add it or remove this one"
            return Fault(rank, slot, action, problem, cause=False)
        places = range(self.walk.places[peer], len(self.slots[peer]))
        place = next(place for place in places if rank in self.walk.ranks_of(peer, place))
        shared = self.walk.messages[peer][place]
        if shared != self.walk.at(rank) and shared in self._left(rank):
            its_slot, its_action = self._slot(peer, place)
            problem = (
                f"ranks {rank} and {peer} have their messages in different orders: rank {peer} first comes to "
                f"{its_action} (slot {its_slot}); put them in the same order on both"
            )
            return Fault(rank, slot, action, problem)
        at_slot, at_action = self._slot(peer, self.walk.places[peer])
        return _waiting(rank, slot, action, f"waits for rank {peer}", at_action, at_slot, in_circle)

    def _slot(self, rank: int, place: int) -> tuple[int, Action]:
        """Return the slot and the action of one of a rank's messages."""
        slot = self.slots[rank][place]
        action = self.plan.actions[rank][slot]
        assert action is not None  # a message comes from an action
        return slot, action


def _on_a_circle(waits: Mapping[int, int]) -> set[int]:
    """Return the ranks that wait, one for the next, for themselves.

    >>> sorted(_on_a_circle({0: 1, 1: 2, 2: 1, 3: 0}))
    [1, 2]
    """
    found: set[int] = set()
    seen: set[int] = set()
    for start in waits:
        path: dict[int, None] = {}
        rank = start
        while rank in waits and rank not in seen:
            seen.add(rank)
            path[rank] = None
            rank = waits[rank]
        if rank in path:
            ranks = list(path)
            found.update(ranks[ranks.index(rank) :])
    return found


def _waiting(rank: int, slot: int, action: Action, what: str, there: Action | None, at: int, in_circle: bool) -> Fault:
    if in_circle:
        return Fault(rank, slot, action, f"deadlock: {what}, which waits at {there} (slot {at}); move one of the two")
    return Fault(rank, slot, action, f"{what}, which cannot go on at {there} (slot {at})", cause=False)


def _circles(plan: Plan) -> list[Fault]:
    """Return the faults of a plan without transfers whose computations wait for each other across ranks."""
    walk = Walk(plan)
    done: set[Action] = set()
    for _, action in walk:
        for leaf in action.leaves:
            done.update(leaf._replace(op=given) for given in GIVES.get(leaf.op, ()))
    waits: dict[int, tuple[int, str]] = {}
    for rank, slot in walk.stuck.items():
        for peer, what in _blocked_by(plan, rank, slot, done):
            if peer != rank and peer in walk.stuck:
                waits.setdefault(rank, (peer, what))
    circle = _on_a_circle({rank: peer for rank, (peer, _) in waits.items()})
    faults = []
    for rank, (peer, what) in waits.items():
        slot, at = walk.stuck[rank], walk.stuck[peer]
        blocked = plan.actions[rank][slot]
        assert blocked is not None  # a bubble never blocks
        faults.append(_waiting(rank, slot, blocked, what, plan.actions[peer][at], at, rank in circle))
    return faults


def _blocked_by(plan: Plan, rank: int, slot: int, done: set[Action]) -> list[tuple[int, str]]:
    """Return the ranks that an action waits for, each with the reason."""
    blocked = plan.actions[rank][slot]
    assert blocked is not None  # a bubble never blocks
    rank_of = plan.placement.rank_of
    if blocked.op is Op.REDUCE_TIES:
        return [(peer, f"waits for rank {peer}") for peer in plan.ranks_of_tie(blocked.microbatch or 0)]
    needs = [need for need in dependencies(blocked, plan.dataflow) if need not in done]
    return [(rank_of[need.stage], f"needs {need} of rank {rank_of[need.stage]}") for need in needs]
