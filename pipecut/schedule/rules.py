"""Placements, the dataflow between stages, and the dependencies between actions: the only place that knows them.

A forward needs the activations of the stages that feed it. An input gradient (I, or a full backward B) needs its own
forward and the gradients of the stages that it feeds. A weight gradient needs the input gradient of its stage. A send
needs its value, a receive its send. Everything that orders actions asks here. The messages that sum tied gradients are
here too, for the ranks that send them and the cost model that prices them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import PlanError
from .action import Action, Op, transfer

# The results of an action, under one name for both ways to get there: B gives the results of I and W.
GIVES: dict[Op, tuple[Op, ...]] = {
    Op.FORWARD: (Op.FORWARD,),
    Op.BACKWARD_INPUT: (Op.BACKWARD_INPUT,),
    Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT,),
    Op.FULL_BACKWARD: (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT),
}


@dataclass(frozen=True)
class Placement:
    """The rank of every stage.

    >>> Placement.loop(ranks=2, chunks=2).rank_of
    (0, 1, 0, 1)
    >>> Placement.v(ranks=2).rank_of
    (0, 1, 1, 0)
    >>> Placement.explicit({0: 0, 1: 0, 2: 1, 3: 1, 4: 0}).stages_of
    ((0, 1, 4), (2, 3))
    """

    rank_of: tuple[int, ...]  # by stage

    def __post_init__(self) -> None:
        if not self.rank_of or min(self.rank_of) < 0:
            raise PlanError(
                f"A placement gives every stage a rank, 0 or more, and has at least one stage; got {self.rank_of}."
            )

    @classmethod
    def loop(cls, ranks: int, chunks: int = 1) -> Placement:
        """Put stage s on rank s mod ranks."""
        check_positive(ranks=ranks, chunks=chunks)
        return cls(tuple(range(ranks)) * chunks)

    @classmethod
    def v(cls, ranks: int, chunks: int = 2) -> Placement:
        """Go down the ranks and up again: with 2 chunks, the first and the last stage are on rank 0."""
        check_positive(ranks=ranks, chunks=chunks)
        down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
        return cls(sum((down if chunk % 2 == 0 else up for chunk in range(chunks)), ()))

    @classmethod
    def explicit(cls, rank_of: Mapping[int, int] | Sequence[int]) -> Placement:
        """Take any map of stages to ranks; stages and ranks are numbered from 0 without gaps."""
        numbers = [*rank_of, *rank_of.values()] if isinstance(rank_of, Mapping) else list(rank_of)
        wrong = [number for number in numbers if not isinstance(number, int) or isinstance(number, bool)]
        if wrong:
            raise PlanError(
                f"The placement has {wrong[0]!r}: stages and ranks are integers, as in {{0: 0, 1: 1, 2: 0}}."
            )
        by_stage = dict(rank_of) if isinstance(rank_of, Mapping) else dict(enumerate(rank_of))
        _check_no_gaps("stage", by_stage)
        _check_no_gaps("rank", by_stage.values())
        return cls(tuple(by_stage[stage] for stage in range(len(by_stage))))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.rank_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))


@dataclass(frozen=True)
class Dataflow:
    """The values that stages use of each other.

    >>> flow = Dataflow.chain(4, skips=[(0, 3)])
    >>> flow.makers[3], flow.users[0]
    ((0, 2), (1, 3))
    """

    stages: int
    activations: frozenset[tuple[int, int]]  # (maker, user)
    gradients: frozenset[tuple[int, int]]  # those (maker, user) for which a gradient goes back to the maker
    root_inputs: frozenset[int] = frozenset()  # later stages that use an input of the model, held by stage 0's rank
    ties: tuple[frozenset[int], ...] = ()  # stages that share a parameter

    def __post_init__(self) -> None:
        for maker, user in sorted(self.activations | self.gradients):
            if not 0 <= maker < user < self.stages:
                raise PlanError(
                    f"The dataflow has an edge from stage {maker} to stage {user}: a value goes to a later stage, "
                    f"and the stages are 0 to {self.stages - 1}."
                )
        extra = sorted(self.gradients - self.activations)
        if extra:
            raise PlanError(f"The dataflow has a gradient for {extra[0]}, but no activation: add that, or remove it.")
        for what, stages in (("root input", self.root_inputs), *(("tie", tie) for tie in self.ties)):
            wrong = [stage for stage in sorted(stages) if not 0 <= stage < self.stages]
            if wrong:
                raise PlanError(
                    f"The dataflow has a {what} at stage {wrong[0]}: the stages are 0 to {self.stages - 1}."
                )

    @classmethod
    def chain(
        cls,
        stages: int,
        skips: Iterable[tuple[int, int]] = (),
        root_inputs: Iterable[int] = (),
        ties: Iterable[Iterable[int]] = (),
    ) -> Dataflow:
        """Let every stage feed the next; `skips` are (maker, user) pairs besides that."""
        edges = frozenset({(stage, stage + 1) for stage in range(stages - 1)} | set(skips))
        return cls(stages, edges, edges, frozenset(root_inputs), tuple(map(frozenset, ties)))

    def has_tie(self, number: int | None, stage: int) -> bool:
        """Return True if there is a tie of that number, and the stage holds its parameter."""
        return number is not None and 0 <= number < len(self.ties) and stage in self.ties[number]

    @cached_property
    def makers(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages whose activations it uses."""
        return self._grouped((user, maker) for maker, user in self.activations)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that use its activations."""
        return self._grouped(self.activations)

    @cached_property
    def gradient_givers(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages whose input gradients it waits for."""
        return self._grouped(self.gradients)

    @cached_property
    def gradient_takers(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that wait for its input gradient."""
        return self._grouped((user, maker) for maker, user in self.gradients)

    def _grouped(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        groups: list[list[int]] = [[] for _ in range(self.stages)]
        for stage, other in sorted(pairs):
            groups[stage].append(other)
        return tuple(map(tuple, groups))

    def needs(self, op: Op, stage: int) -> tuple[tuple[Op, int], ...]:
        """Return the computations, as (result, stage), that must be done for the same microbatch before this one."""
        if op is Op.FORWARD:
            return tuple((Op.FORWARD, maker) for maker in self.makers[stage])
        if op is Op.BACKWARD_WEIGHT:
            return ((Op.BACKWARD_INPUT, stage),)
        return ((Op.FORWARD, stage), *((Op.BACKWARD_INPUT, giver) for giver in self.gradient_givers[stage]))

    def messages(self, op: Op, stage: int, placement: Placement) -> tuple[tuple[Op, int], ...]:
        """Return the messages to other ranks after a computation: (SEND_F or SEND_B, the receiving stage)."""
        here = placement.rank_of[stage]
        if op is Op.FORWARD:
            users = set(self.users[stage]) | (self.root_inputs if stage == 0 else set())
            return tuple((Op.SEND_F, user) for user in sorted(users) if placement.rank_of[user] != here)
        if op is Op.BACKWARD_WEIGHT:
            return ()
        takers = reversed(self.gradient_takers[stage])
        return tuple((Op.SEND_B, taker) for taker in takers if placement.rank_of[taker] != here)

    def receives(self, op: Op, stage: int, placement: Placement) -> tuple[tuple[Op, int], ...]:
        """Return the messages from other ranks before a computation: (RECV_F or RECV_B, the sending stage)."""
        here = placement.rank_of[stage]
        if op is Op.FORWARD:
            makers = set(self.makers[stage]) | ({0} if stage in self.root_inputs else set())
            return tuple((Op.RECV_F, maker) for maker in sorted(makers) if placement.rank_of[maker] != here)
        if op is Op.BACKWARD_WEIGHT:
            return ()
        return tuple((Op.RECV_B, giver) for giver in self.gradient_givers[stage] if placement.rank_of[giver] != here)


def dependencies(action: Action, dataflow: Dataflow, placement: Placement | None = None) -> tuple[Action, ...]:
    """Return the actions that must be done before this one. With a placement, values of other ranks come by receives.

    A backward that is needed is named I; a full backward B counts as it.

    >>> flow = Dataflow.chain(3)
    >>> dependencies(Action(1, Op.FULL_BACKWARD, 4), flow)
    (1F4, 2I4)
    >>> dependencies(Action(1, Op.FULL_BACKWARD, 4), flow, Placement.loop(ranks=3))
    (1F4, 1RECV_B4)
    """
    found: list[Action] = []
    for leaf in action.leaves:
        found += _leaf_dependencies(leaf, dataflow, placement)
    inside = {Action(leaf.stage, given, leaf.microbatch) for leaf in action.leaves for given in GIVES.get(leaf.op, ())}
    return tuple(need for need in dict.fromkeys(found) if need not in inside or not action.parts)


def _leaf_dependencies(action: Action, dataflow: Dataflow, placement: Placement | None) -> list[Action]:
    stage, op, microbatch = action.stage, action.op, action.microbatch
    if not 0 <= stage < dataflow.stages:
        raise PlanError(f"{action} is of no stage: the dataflow has stages 0 to {dataflow.stages - 1}.")
    if op is Op.SEND_F:
        made = (stage, action.other_stage) in dataflow.activations
        return [Action(stage, Op.FORWARD, microbatch)] if made else []  # an input of the model needs no forward
    if op is Op.SEND_B:
        return [Action(stage, Op.BACKWARD_INPUT, microbatch)]
    if action.is_transfer:
        return [action.counterpart]
    if op not in GIVES:
        return []
    needs = dataflow.needs(op, stage)
    if placement is None:
        return [Action(other, given, microbatch) for given, other in needs]
    here = placement.rank_of[stage]
    local = [Action(other, given, microbatch) for given, other in needs if placement.rank_of[other] == here]
    return local + [
        transfer(arrival, stage, microbatch, other) for arrival, other in dataflow.receives(op, stage, placement)
    ]


# The messages by which ranks sum the gradient of a parameter that several of them hold.
#
# The first rank adds up, in the order of the ranks, and sends the sum back. So all holders have the same bits, and
# their parameters stay the same through any number of optimizer steps. With three ranks:
#
#     rank 1 --status, gradient--> rank 0
#     rank 2 --status, gradient--> rank 0
#     rank 0 --status, sum-------> rank 1
#     rank 0 --status, sum-------> rank 2
#
# Each direction takes two messages: a status word, then the gradient. A rank that has frozen the parameter, or has no
# gradient, says so in its status, and nobody waits for its gradient.
#
# This file is the only one that knows the algorithm: pipecut.run carries out these messages, and the cost model prices
# them.


class _TieMessage(NamedTuple):
    """One message between two ranks that hold a tied parameter."""

    source: int
    target: int
    has_gradient: bool = False  # False: the status of all ranks that the source knows of
    is_added: bool = False  # True: the target adds the gradient to its own. False: it replaces it


def tie_messages(ranks: Sequence[int]) -> Iterator[_TieMessage]:
    """Yield the messages of one sum between ranks, in an order in which they can be sent one after the other.

    >>> [(message.source, message.target) for message in tie_messages([0, 3]) if message.has_gradient]
    [(3, 0), (0, 3)]
    """
    first, *others = ranks
    for other in others:
        yield _TieMessage(other, first)
        yield _TieMessage(other, first, has_gradient=True, is_added=True)
    for other in others:
        yield _TieMessage(first, other)
        yield _TieMessage(first, other, has_gradient=True)


def _check_no_gaps(what: str, numbers: Collection[int]) -> None:
    missing = first_missing(numbers)
    has_gap = not numbers or missing < max(numbers)
    if has_gap or min(numbers) < 0:
        wrong = f"no {what} {missing}" if has_gap else f"{what} {min(numbers)}"
        raise PlanError(f"The placement has {wrong}: number the {what}s 0, 1, 2... without gaps.")


def first_missing(numbers: Collection[int]) -> int:
    """Return the smallest integer from 0 up that is missing: the next one, if there is no gap.

    >>> first_missing([0, 1, 5]), first_missing([2, 0, 1])
    (2, 3)
    """
    there = set(numbers)
    return next(number for number in range(len(there) + 1) if number not in there)


def check_positive(**sizes: int) -> None:
    """Raise unless the sizes are integers from 1 up."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PlanError(f"{name}={size!r}: give an integer number of {name}, 1 or more.")
