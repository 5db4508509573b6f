"""The sum of the gradients of a parameter that stages on several ranks share."""

from __future__ import annotations

from ..action import Action, Op
from ..plan import Plan


def add_reduce_ties(plan: Plan) -> Plan:
    """At the end of every rank, one REDUCE_TIES for each tie that it shares with another rank, in the ties' order.

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
    """The plan without the sums of ties: they come after whatever other passes put at the end of a rank."""
    return plan.with_actions([[each for each in row if not _is_sum(each)] for row in plan.actions])


def _is_sum(action: Action | None) -> bool:
    return action is not None and action.op is Op.REDUCE_TIES
