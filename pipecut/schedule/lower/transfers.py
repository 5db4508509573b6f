"""Lowering of a plan, and the passes that every plan needs: messages between ranks, of values and of tied gradients.

Transfers are put where no order of arrival can block them. The plan is walked in an order that its dependencies allow.
When a computation is done, its sends and, on the other ranks, their receives are added at that same moment. So all
ranks take part in the messages in one common order, and none waits for another in a circle, even if a send returns only
when its receive has begun.

      0F0 0B0        0F0 0SEND_F0          0RECV_B0 0B0
      1F0 1B0   ->       1RECV_F0 1F0 1B0  1SEND_B0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...errors import PlanError
from ...text import did_you_mean
from ..action import Action, Op, transfer
from ..plan import Plan, collector_paused
from ..rules import GIVES
from ..walk import Walk
from .reorder import receive_early, receive_late
from .sharding import add_reduce_grad, add_unshard_reshard

_RECEIVES: dict[str, Callable[[Plan], Plan]] = {
    "as_sent": lambda plan: plan,
    "early": receive_early,
    "late": receive_late,
}


@collector_paused
def lower(plan: Plan, *, max_held: int | None = None, receives: str = "as_sent") -> Plan:
    """Make a plan executable: add messages between ranks, sums of tied gradients and, with `max_held`, sharding.

    `max_held` is the number of stages that a rank may hold unsharded at a time (UNSHARD, RESHARD and REDUCE_GRAD are
    added); an overlap holds all of its own while it runs.
    `receives` says where a receive stands: "as_sent", at the turn of its send; "early", right after the message before
    it; "late", right before its first use. A plan that has its transfers, its sharding or its reductions keeps them.
    """
    if receives not in _RECEIVES:
        near = did_you_mean(str(receives), _RECEIVES)
        raise PlanError(f"receives={receives!r} is not known.{near} Choose one of {', '.join(map(repr, _RECEIVES))}.")
    if not plan.has_transfers:
        plan = add_transfers(plan)
    # After the transfers: a rank may shard its stages while others do not, and still meet them in the same order.
    if max_held is not None:
        plan = plan if {Op.UNSHARD, Op.RESHARD} & plan.ops else add_unshard_reshard(plan, max_held)
        plan = plan if Op.REDUCE_GRAD in plan.ops else add_reduce_grad(plan)
    return _RECEIVES[receives](add_reduce_ties(plan))


@collector_paused
def add_transfers(plan: Plan, *, complete: bool = True) -> Plan:
    """Add a SEND and a RECV for every value that another rank uses, and none between stages of one rank.

    `complete=False` takes a part of a step too.
    """
    if plan.has_transfers:
        raise PlanError(f"The plan '{plan.name}' has transfers already: add them to a plan of computations only.")
    if plan.is_big:
        from ..lockstep import add_transfers_together

        made = add_transfers_together(plan)
        if made is not None:
            return made
    messages = {(op, stage): _ends(plan, op, stage) for op in GIVES for stage in range(plan.stages)}
    early = _EarlyInputs(plan)
    rows: list[list[Action | None]] = [[] for _ in plan.actions]
    walk = Walk(plan)
    for rank, action in walk:
        if early.users:
            early.send_before(action, rows)
        row = rows[rank]
        row.append(action)
        for leaf in action.parts or (action,):
            stage, op, microbatch, _, _ = leaf
            for send, send_peer, receive, other, receive_peer, other_rank in messages.get((op, stage), ()):
                if stage == 0 and other in early.users:
                    continue
                row.append(Action(stage, send, microbatch, send_peer))
                rows[other_rank].append(Action(other, receive, microbatch, receive_peer))
    walk.check_finished(complete=complete)
    return plan.with_actions(rows)


class _Ends(NamedTuple):
    """The parts of the two ends of a message, besides the microbatch and the sending stage."""

    send: Op
    send_peer: int | None
    receive: Op
    other: int  # the receiving stage
    receive_peer: int | None
    other_rank: int


def _ends(plan: Plan, op: Op, stage: int) -> list[_Ends]:
    """Return the messages that a computation of a stage sends."""
    found = []
    for send, other in plan.dataflow.messages(op, stage, plan.placement):
        end = transfer(send, stage, 0, other)
        there = end.counterpart
        found.append(_Ends(send, end.peer, there.op, other, there.peer, plan.placement.rank_of[other]))
    return found


class _EarlyInputs:
    """Inputs of the model for later stages: nothing computes them, so they go ahead of the first stage's forward.

    If the turn of the later stage comes before that, they are sent on demand.
    """

    def __init__(self, plan: Plan) -> None:
        rank_of = plan.placement.rank_of
        self.first_rank = rank_of[0]
        self.users = {
            stage
            for stage in sorted(plan.dataflow.root_inputs)
            if rank_of[stage] != self.first_rank and (0, stage) not in plan.dataflow.activations
        }
        self._rank_of = rank_of
        self._sent: set[tuple[int, int | None]] = set()

    def send_before(self, action: Action, rows: list[list[Action | None]]) -> None:
        """Add, before an action, the transfers of inputs that are due."""
        for leaf in action.leaves:
            stage, op, microbatch, _, _ = leaf
            if op is Op.FORWARD:
                for user in sorted(self.users) if stage == 0 else [stage] if stage in self.users else []:
                    if (user, microbatch) not in self._sent:
                        self._sent.add((user, microbatch))
                        receive = transfer(Op.RECV_F, user, microbatch, 0)
                        rows[self.first_rank].append(receive.counterpart)
                        rows[self._rank_of[user]].append(receive)


def add_reduce_ties(plan: Plan) -> Plan:
    """Add, at the end of every rank, one REDUCE_TIES for each tie that it shares with another, in the ties' order.

    Ties between stages of one rank need none: there the parameter is one object.

    tie 0 is {0, 1}      0F0 0B0   ->   0F0 0B0 0REDUCE_TIES0
                         1F0 1B0        1F0 1B0 1REDUCE_TIES0
    """
    if not plan.training or not plan.dataflow.ties or Op.REDUCE_TIES in plan.ops:
        return plan
    rows = [list(row) for row in plan.actions]
    for number, holders in enumerate(plan.dataflow.ties):
        first_holder: dict[int, int] = {}
        for stage in sorted(holders):
            first_holder.setdefault(plan.placement.rank_of[stage], stage)
        if len(first_holder) > 1:
            for rank, stage in first_holder.items():
                rows[rank].append(Action(stage, Op.REDUCE_TIES, number))
    return plan.with_actions(rows)


def drop_reduce_ties(plan: Plan) -> Plan:
    """Drop the sums of ties: they come after all that other passes put at the end of a rank."""
    return plan.with_actions([[each for each in row if not _is_sum(each)] for row in plan.actions])


def _is_sum(action: Action | None) -> bool:
    return action is not None and action.op is Op.REDUCE_TIES
