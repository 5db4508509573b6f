"""All ranks together: no circle of ranks that wait for each other, even if a send returns only when it is received."""

from __future__ import annotations

from collections.abc import Mapping

from ..action import Action, Op
from ..plan import Plan
from ..rules import GIVES, dependencies
from ..walk import Walk
from .order import Books, Fault


def deadlock_faults(plan: Plan, books: Books) -> list[Fault]:
    """Where ranks wait for each other for ever."""
    if plan.has_transfers or any(books.messages):
        faults = _Meetings(plan, books).faults()
        if plan.has_transfers or faults:
            return faults
    return _circles(plan) if books.known else []


class _Meetings:
    """The messages of a plan, each of which happens when all its ranks have come to it."""

    def __init__(self, plan: Plan, books: Books) -> None:
        self.plan = plan
        self.messages = books.messages
        self.steps = books.message_steps
        self.peers = books.message_peers
        self.places = [0] * len(books.messages)

    def holders(self, tie: int) -> set[int]:
        """The ranks that the sum of a tie takes; `tie` is the number of its message."""
        return set(self.plan.ranks_of_tie(-1 - tie))

    def others(self, rank: int, place: int) -> set[int]:
        """The ranks that a rank meets in one of its messages."""
        message = self.messages[rank][place]
        return {self.peers[rank][place]} if message >= 0 else self.holders(message) - {rank}

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
                    if not self._sum(message, turns):
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

    def _sum(self, tie: int, turns: list[int]) -> bool:
        """Let the sum of a tie happen, if all its ranks have come to it."""
        ranks = self.holders(tie)
        if any(self.at(rank) != tie for rank in ranks):
            return False
        for rank in ranks:
            self.places[rank] += 1
            turns.append(rank)
        return True

    def at(self, rank: int) -> int | None:
        """The message that a rank has come to."""
        place = self.places[rank]
        return self.messages[rank][place] if place < len(self.messages[rank]) else None

    def faults(self) -> list[Fault]:
        """One fault for each rank that does not come to its end."""
        self.run()
        stuck = [rank for rank in range(len(self.messages)) if self.at(rank) is not None]
        waits = {rank: self._waits_for(rank) for rank in stuck}
        circle = _on_a_circle({rank: peer for rank, peer in waits.items() if self._is_to_come(rank, peer)})
        return [self._explain(rank, waits[rank], rank in circle) for rank in stuck]

    def _waits_for(self, rank: int) -> int:
        """The first rank that has not come to where this one waits."""
        others = sorted(self.others(rank, self.places[rank]))
        return next(peer for peer in others if self.at(peer) != self.at(rank))

    def _is_to_come(self, rank: int, peer: int) -> bool:
        """Whether the other rank would take part, if it got there."""
        return self.messages[rank][self.places[rank]] in self.messages[peer][self.places[peer] :]

    def _explain(self, rank: int, peer: int, in_circle: bool) -> Fault:
        step, action = self._here(rank)
        message = self.messages[rank][self.places[rank]]
        if not self._is_to_come(rank, peer):
            problem = f"waits for ever: rank {peer} has no other end for it from there on; add it or remove this one"
            return Fault(rank, step, action, problem, cause=False)
        at_step, at_action = self._here(peer)
        places = range(self.places[peer], len(self.messages[peer]))
        place = next(place for place in places if rank in self.others(peer, place))
        shared = self.messages[peer][place]
        if shared != message and shared in self.messages[rank][self.places[rank] :]:
            problem = (
                f"ranks {rank} and {peer} have their messages in different orders: rank {peer} first comes to "
                f"{self._action(peer, place)} (step {self.steps[peer][place]}); put them in the same order on both"
            )
            return Fault(rank, step, action, problem)
        return _waiting(rank, step, action, f"waits for rank {peer}", at_action, at_step, in_circle)

    def _here(self, rank: int) -> tuple[int, Action]:
        place = self.places[rank]
        return self.steps[rank][place], self._action(rank, place)

    def _action(self, rank: int, place: int) -> Action:
        action = self.plan.actions[rank][self.steps[rank][place]]
        assert action is not None  # a message comes from an action
        return action


def _on_a_circle(waits: Mapping[int, int]) -> set[int]:
    """The ranks that wait, one for the next, for themselves.

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


def _waiting(rank: int, step: int, action: Action, what: str, there: Action | None, at: int, in_circle: bool) -> Fault:
    if in_circle:
        return Fault(rank, step, action, f"deadlock: {what}, which waits at {there} (step {at}); move one of the two")
    return Fault(rank, step, action, f"{what}, which cannot go on at {there} (step {at})", cause=False)


def _circles(plan: Plan) -> list[Fault]:
    """For a plan without transfers: the computations that wait for each other across ranks."""
    walk = Walk(plan)
    done: set[Action] = set()
    for _, action in walk:
        for leaf in action.leaves:
            done.update(leaf._replace(op=given) for given in GIVES.get(leaf.op, ()))
    waits: dict[int, tuple[int, str]] = {}
    for rank, step in walk.stuck.items():
        for peer, what in _blocked_by(plan, rank, step, done):
            if peer != rank and peer in walk.stuck:
                waits.setdefault(rank, (peer, what))
    circle = _on_a_circle({rank: peer for rank, (peer, _) in waits.items()})
    faults = []
    for rank, (peer, what) in waits.items():
        step, at = walk.stuck[rank], walk.stuck[peer]
        blocked = plan.actions[rank][step]
        assert blocked is not None  # a bubble never blocks
        faults.append(_waiting(rank, step, blocked, what, plan.actions[peer][at], at, rank in circle))
    return faults


def _blocked_by(plan: Plan, rank: int, step: int, done: set[Action]) -> list[tuple[int, str]]:
    """The ranks that an action waits for, and what for."""
    blocked = plan.actions[rank][step]
    assert blocked is not None  # a bubble never blocks
    rank_of = plan.placement.rank_of
    if blocked.op is Op.REDUCE_TIES:
        return [(peer, f"waits for rank {peer}") for peer in plan.ranks_of_tie(blocked.microbatch or 0)]
    needs = [need for need in dependencies(blocked, plan.dataflow) if need not in done]
    return [(rank_of[need.stage], f"needs {need} of rank {rank_of[need.stage]}") for need in needs]
