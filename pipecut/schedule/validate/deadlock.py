"""All ranks together: no circle of ranks that wait for each other, even if a send returns only when it is received."""

from __future__ import annotations

from ..action import Action
from ..plan import Plan
from ..rules import GIVES, dependencies
from ..walk import Walk
from .fault import Fault
from .order import Books


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
        return {self.plan.placement.rank_of[stage] for stage in self.plan.dataflow.ties[-1 - tie]}

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
        return [
            self._explain(rank, message) for rank in range(len(self.messages)) if (message := self.at(rank)) is not None
        ]

    def _explain(self, rank: int, message: int) -> Fault:
        step, action = self._here(rank)
        missing = [peer for peer in sorted(self.others(rank, self.places[rank])) if self.at(peer) != message]
        if not missing:
            return Fault(rank, step, action, "never gets to run: it meets itself; remove one of the two")
        peer = missing[0]
        rest = self.messages[peer][self.places[peer] :]
        if message not in rest:
            problem = f"waits for ever: rank {peer} has no other end for it from there on; add it or remove this one"
            return Fault(rank, step, action, problem)
        at_step, at_action = self._here(peer)
        places = range(self.places[peer], len(self.messages[peer]))
        place = next(place for place in places if rank in self.others(peer, place))
        shared = self.messages[peer][place]
        if shared != message and shared in self.messages[rank][self.places[rank] :]:
            problem = (
                f"ranks {rank} and {peer} have their messages in different orders: rank {peer} first comes to "
                f"{self._action(peer, place)} (step {self.steps[peer][place]}); put them in the same order on both"
            )
        else:
            problem = (
                f"deadlock: waits for rank {peer}, which waits at {at_action} (step {at_step}); move one of the two"
            )
        return Fault(rank, step, action, problem)

    def _here(self, rank: int) -> tuple[int, Action]:
        place = self.places[rank]
        return self.steps[rank][place], self._action(rank, place)

    def _action(self, rank: int, place: int) -> Action:
        action = self.plan.actions[rank][self.steps[rank][place]]
        assert action is not None  # a message comes from an action
        return action


def _circles(plan: Plan) -> list[Fault]:
    """For a plan without transfers: the computations that wait for each other across ranks."""
    walk = Walk(plan)
    done: set[Action] = set()
    for _, action in walk:
        for leaf in action.leaves:
            done.update(leaf._replace(op=given) for given in GIVES.get(leaf.op, ()))
    faults = []
    for rank, step in walk.stuck.items():
        blocked = plan.actions[rank][step]
        assert blocked is not None  # a bubble never blocks
        for need in dependencies(blocked, plan.dataflow):
            peer = plan.placement.rank_of[need.stage]
            if need in done or peer == rank or peer not in walk.stuck:
                continue
            there = walk.stuck[peer]
            problem = (
                f"deadlock: needs {need} of rank {peer}, which waits at {plan.actions[peer][there]} (step {there})"
            )
            faults.append(Fault(rank, step, blocked, f"{problem}; move one of the two"))
    return faults
