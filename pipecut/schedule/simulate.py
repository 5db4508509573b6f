"""Simulation of a plan: the start and the end of every computation, if each takes the time that it costs.

A rank runs its actions in order. A computation starts when its rank is free and the values of other ranks have arrived.
A message leaves at the end of the computation that makes it or, in a plan with transfers, at the turn of its send, and
travels while both ranks go on. Receives are taken to be posted in time. Transfers take no time of a rank, but the sum
of a tie waits for the last of its ranks, and takes as long as its messages if their sizes are known. Parameters are
gathered beside computations, one stage of a rank after the other, and the computations of the stage wait for them; the
average of gradients over copies takes the time of its rank, and others go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import PlanError
from .action import SENDS, Action, Op
from .costs import Costs
from .plan import Plan, collector_paused
from .report import Record, Report, Wait
from .rules import GIVES
from .walk import Walk

_SEND_OF = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
_WAIT_FOR = {Op.RECV_F: Wait.FORWARD, Op.RECV_B: Wait.BACKWARD}


@collector_paused
def simulate(plan: Plan, costs: Costs | None = None) -> Report:
    """Simulate a plan. Without costs F, I and W take 1 each for a rank's stages together, and messages nothing.

    >>> plan = Plan.from_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    >>> report = simulate(plan, Costs(forward=2, backward_input=2, backward_weight=1, transfer=0.5))
    >>> report.makespan, report.bubble_rate
    (11.0, 0.5454545454545454)
    >>> [(span.action, span.start, span.end) for span in report.timeline]
    [(0F0, 0.0, 2.0), (0B0, 8.0, 11.0), (1F0, 2.5, 4.5), (1B0, 4.5, 7.5)]
    """
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise PlanError(f"costs={costs!r}: give Costs, as in simulate(plan, Costs(forward=18.5, transfer=0.6)).")
    if plan.is_big:
        from .big_record import simulate_together

        record = simulate_together(plan, costs)
        if record is not None:
            return Report(plan, costs, record)
    walk = Walk(plan)
    clock = _Clock(walk, costs)
    handlers = clock.handlers
    for rank, action in walk:
        handlers[action.op](rank, action)
    walk.check_finished()
    return Report(plan, costs, clock.record)


class _Work(NamedTuple):
    """One of the computations of a stage."""

    time: float
    needed: tuple[tuple[int, Wait], ...]
    made: tuple[_Message, ...]


class _Clock:
    """The time on every rank, and when each message arrives.

    The values of its own rank are available once the rank is free, so that only messages are looked up.
    """

    def __init__(self, walk: Walk, costs: Costs) -> None:
        self.plan = plan = walk.plan
        self.record = Record()
        self.free = [0.0] * len(plan.actions)  # when each rank has done all before
        self.last = [-1] * len(plan.actions)  # the computation whose end that is
        ops = {leaf.op for row in walk.rows for action in row if action for leaf in action.parts or (action,)}
        self.messages = _Messages(plan, costs, backward=bool(ops & {Op.BACKWARD_INPUT, Op.FULL_BACKWARD}))
        self.arrivals = [0.0] * len(self.messages)
        self.makers = [-1] * len(self.messages)  # the computation at whose end a message left
        for first, travel in self.messages.inputs:
            self.arrivals[first : first + plan.microbatches] = [travel] * plan.microbatches
        table = costs.table(plan)
        self.work = {
            op: [
                _Work(table.time[op][stage], self.messages.needed(op, stage), self.messages.made(op, stage))
                for stage in range(plan.stages)
            ]
            for op in ops & GIVES.keys()
        }
        self.handlers: dict[Op, Callable[[int, Action], None]] = dict.fromkeys(Op, _takes_no_time)
        self.handlers |= dict.fromkeys((*GIVES, Op.OVERLAP_F_B), self._compute)
        self.handlers |= dict.fromkeys(SENDS, self._send)
        self.handlers[Op.REDUCE_TIES] = self._sum_tie
        self.collectives = costs.collective_times(plan)
        self.gathered: dict[int, float] = {}  # when the parameters of each stage are there
        if any(self.collectives[Op.UNSHARD]):
            self.handlers |= {Op.UNSHARD: self._gather} | dict.fromkeys(GIVES, self._compute_gathered)
            self.handlers[Op.OVERLAP_F_B] = self._compute_gathered
        if any(self.collectives[Op.REDUCE_GRAD]):
            self.handlers[Op.REDUCE_GRAD] = self._reduce
        self.tie_times = [costs.tie_time(plan, number) for number in range(len(plan.dataflow.ties))]
        self.summed: set[int] = set()

    def _compute(self, rank: int, action: Action) -> None:
        """Run a computation; the parts of an overlap run one after the other, and their messages leave at its end."""
        start, before, wait = self.free[rank], self.last[rank], Wait.RANK
        end, number = 0.0, len(self.record.actions)
        leaves = action.parts or (action,)
        for stage, op, microbatch, _, _ in leaves:
            time, needed, _ = self.work[op][stage]
            end += time
            for message, reason in needed:
                arrival = self.arrivals[message + (microbatch or 0)]
                if arrival > start:
                    start, before, wait = arrival, self.makers[message + (microbatch or 0)], reason
        end += start
        for stage, op, microbatch, _, _ in leaves:
            for message, travel in self.work[op][stage].made:
                self.arrivals[message + (microbatch or 0)] = end + travel
                self.makers[message + (microbatch or 0)] = number
        self.free[rank], self.last[rank] = end, number
        self.record.add(rank, action, start, end, before, wait)

    def _gather(self, rank: int, action: Action) -> None:
        """Begin to gather parameters, after those of the stages before."""
        own = [self.gathered.get(stage, 0.0) for stage in self.plan.placement.stages_of[rank]]
        self.gathered[action.stage] = max(self.free[rank], *own) + self.collectives[Op.UNSHARD][action.stage]

    def _compute_gathered(self, rank: int, action: Action) -> None:
        """Run a computation, once the parameters of its stages are there."""
        stages = [leaf.stage for leaf in action.parts or (action,)]
        self.free[rank] = max(self.free[rank], *(self.gathered.get(stage, 0.0) for stage in stages))
        self._compute(rank, action)

    def _reduce(self, rank: int, action: Action) -> None:
        """Average gradients over the copies of a stage, which arrive at the same time."""
        start, number = self.free[rank], len(self.record.actions)
        self.free[rank] = start + self.collectives[Op.REDUCE_GRAD][action.stage]
        self.record.add(rank, action, start, self.free[rank], self.last[rank], Wait.RANK)
        self.last[rank] = number

    def _send(self, rank: int, action: Action) -> None:
        first, travel = self.messages.by_ends[action.op, action.stage, action.other_stage]
        message = first + (action.microbatch or 0)
        self.arrivals[message] = self.free[rank] + travel
        self.makers[message] = self.last[rank]

    def _sum_tie(self, rank: int, action: Action) -> None:
        """Sum a tie: no rank of it goes on before the last arrives; the walk brings all of them here."""
        tie = action.microbatch or 0
        if tie not in self.summed:
            self.summed.add(tie)
            ranks = self.plan.ranks_of_tie(tie)
            latest = max(ranks, key=self.free.__getitem__)
            for each in ranks:
                if self.free[each] < self.free[latest]:
                    self.free[each], self.last[each] = self.free[latest], self.last[latest]
        if self.tie_times[tie] > 0:
            start, number = self.free[rank], len(self.record.actions)
            self.record.add(rank, action, start, start + self.tie_times[tie], self.last[rank], Wait.RANK)
            self.free[rank], self.last[rank] = start + self.tie_times[tie], number


def _takes_no_time(rank: int, action: Action) -> None:
    """Do nothing: for receives, and for collectives without a cost."""


class _Message(NamedTuple):
    """One kind of message: its number for microbatch 0, which those of the others follow, and its travel time."""

    number: int
    travel: float


class _Messages:
    """All messages of a plan, with or without transfers of its own; `backward`: gradients go back."""

    def __init__(self, plan: Plan, costs: Costs, *, backward: bool) -> None:
        self.plan = plan
        self.by_ends: dict[tuple[Op, int, int], _Message] = {}  # (SEND_F or SEND_B, source stage, target stage)
        for stage in range(plan.stages):
            for op in (Op.FORWARD, Op.BACKWARD_INPUT) if backward else (Op.FORWARD,):
                for send, other in plan.dataflow.messages(op, stage, plan.placement):
                    travel = costs.message_time(plan.placement, send, stage, other)
                    self.by_ends[send, stage, other] = _Message(len(self), travel)

    def __len__(self) -> int:
        return len(self.by_ends) * self.plan.microbatches

    @property
    def inputs(self) -> list[_Message]:
        """The messages that carry only an input of the model: there from the start, made by no computation."""
        return [message for ends, message in self.by_ends.items() if self._is_input(*ends)]

    def needed(self, op: Op, stage: int) -> tuple[tuple[int, Wait], ...]:
        """Return the messages that a computation waits for: number and kind of wait."""
        received = self.plan.dataflow.receives(op, stage, self.plan.placement)
        return tuple(
            (self.by_ends[_SEND_OF[receive], other, stage].number, _WAIT_FOR[receive]) for receive, other in received
        )

    def made(self, op: Op, stage: int) -> tuple[_Message, ...]:
        """Return the messages that leave at the end of a computation: none if the plan has sends of its own."""
        if self.plan.has_transfers:
            return ()
        sent = self.plan.dataflow.messages(op, stage, self.plan.placement)
        return tuple(self.by_ends[send, stage, other] for send, other in sent if not self._is_input(send, stage, other))

    def _is_input(self, send: Op, stage: int, other: int) -> bool:
        return send is Op.SEND_F and (stage, other) not in self.plan.dataflow.activations
