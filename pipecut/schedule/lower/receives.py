"""Where a receive stands: early, so that a message travels during other work, or late, so that it holds no buffer.

A receive passes computations only. The order of messages, which is what keeps a plan free of deadlock, stays as it is.
"""

from __future__ import annotations

from ..action import RECEIVES, TRANSFERS, Action, Op
from ..plan import Plan
from ..rules import dependencies

MEETINGS = TRANSFERS | {Op.REDUCE_TIES}  # what a rank does together with another


def receive_early(plan: Plan) -> Plan:
    """Every receive right after the message before it.

    1RECV_F0 1F0 1RECV_F1 1F1   ->   1RECV_F0 1RECV_F1 1F0 1F1
    """
    rows = []
    for row in plan.actions:
        early: list[Action | None] = []
        since_message: list[Action | None] = []
        for action in row:
            if action is None or action.op not in MEETINGS:
                since_message.append(action)
            elif action.op in RECEIVES:
                early.append(action)
            else:
                early += [*since_message, action]
                since_message = []
        rows.append(early + since_message)
    return plan.with_actions(rows)


def receive_late(plan: Plan) -> Plan:
    """Every receive right before its first use, or before the next send, whichever comes first.

    1RECV_F0 1RECV_F1 1F0 1F1   ->   1RECV_F0 1F0 1RECV_F1 1F1
    """
    rows = []
    for row in plan.actions:
        late: list[Action | None] = []
        waiting: list[Action] = []
        for action in row:
            if action is not None and action.op in RECEIVES:
                waiting.append(action)
                continue
            if action is not None and waiting:
                used = _used_by(action, plan, waiting)
                late += waiting[:used]
                waiting = waiting[used:]
            late.append(action)
        rows.append([*late, *waiting])
    return plan.with_actions(rows)


def _used_by(action: Action, plan: Plan, waiting: list[Action]) -> int:
    """How many of the waiting receives must come before an action; they keep their order."""
    if action.op in MEETINGS:
        return len(waiting)
    needs = dependencies(action, plan.dataflow, plan.placement)
    return max((place + 1 for place, receive in enumerate(waiting) if receive in needs), default=0)
