"""Check all ranks together: none wait for each other in a circle, even if a send returns only when it is received."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from ..action import Action, Op
from ..plan import Plan
from ..rules import GIVES, dependencies
from ..walk import MEETINGS, Walk
from .order import Books, Fault


def deadlock_faults(plan: Plan, books: Books) -> list[Fault]:
    """Return a fault for each rank that waits for ever."""
    if plan.has_transfers or any(action.op is Op.REDUCE_TIES for row in books.upkeep for _, action in row):
        faults = _Messages(_without(plan, books.unknown)).faults()
        if plan.has_transfers or faults:
            return faults
    return [] if books.unknown else _circles(plan)


def _without(plan: Plan, unknown: set[tuple[int, int]]) -> Plan:
    if not unknown:
        return plan
    return plan.with_actions(
        (None if (rank, slot) in unknown else action for slot, action in enumerate(row))
        for rank, row in enumerate(plan.actions)
    )


class _Messages:
    """A walk through the messages and the sums of ties of a plan, and an explanation for each rank that is stuck.

    Computations count as done, so that one that is missing or too early, a fault of its own, hides no deadlock.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.walk = Walk(plan, messages_only=True)

    def faults(self) -> list[Fault]:
        """Walk, and return one fault for each rank that does not come to its end."""
        deque(self.walk, maxlen=0)
        stuck = list(self.walk.stuck)
        waits = {rank: self._waits_for(rank) for rank in stuck}
        circle = _on_a_circle({rank: peer for rank, peer in waits.items() if self._is_to_come(rank, peer)})
        return [self._explain(rank, waits[rank], rank in circle) for rank in stuck]

    def _left(self, rank: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """The messages that a rank has not done: slot, number and ranks."""
        row = self.plan.actions[rank]
        for slot in range(self.walk.places[rank], len(row)):
            action = row[slot]
            if action is not None and action.op in MEETINGS:
                yield slot, *self.walk.meeting(action)

    def _waits_for(self, rank: int) -> int:
        """The first rank that has not come to where this one waits."""
        _, message, ranks = next(self._left(rank))
        return next(peer for peer in sorted(ranks) if self.walk.waits_in(peer) != message)

    def _is_to_come(self, rank: int, peer: int) -> bool:
        """Return True if the other rank would take part, if it got there."""
        return self._has_left(peer, self.walk.waits_in(rank))

    def _has_left(self, rank: int, message: int | None) -> bool:
        return any(number == message for _, number, _ in self._left(rank))

    def _explain(self, rank: int, peer: int, in_circle: bool) -> Fault:
        slot, message, _ = next(self._left(rank))
        action = self._action(rank, slot)
        if not self._is_to_come(rank, peer):
            problem = f"waits for ever: rank {peer} has no other end for it from there on; add it or remove this one"
            return Fault(rank, slot, action, problem, cause=False)
        place, shared, _ = next(left for left in self._left(peer) if rank in left[2])
        if shared != message and self._has_left(rank, shared):
            problem = (
                f"ranks {rank} and {peer} have their messages in different orders: rank {peer} first comes to "
                f"{self._action(peer, place)} (slot {place}); put them in the same order on both"
            )
            return Fault(rank, slot, action, problem)
        at_slot = self.walk.places[peer]
        return _waiting(rank, slot, action, f"waits for rank {peer}", self._action(peer, at_slot), at_slot, in_circle)

    def _action(self, rank: int, slot: int) -> Action:
        action = self.plan.actions[rank][slot]
        assert action is not None  # a message comes from an action
        return action


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
