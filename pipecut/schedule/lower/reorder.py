"""Passes that merge, space out or reorder the actions of a plan without adding any."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import PlanError
from ..action import RECEIVES, Action, Op
from ..plan import Plan
from ..rules import GIVES, dependencies
from ..walk import MEETINGS, Ledger, Walk, first_unknown


def merge_backwards(plan: Plan) -> Plan:
    """Merge adjacent input- and weight-gradient actions into full backwards, which cost less than the two.

    0F0 0I0 0W0 0F1 0I1 1F0 0W1   ->   0F0 0B0 0F1 0I1 1F0 0W1
    """
    return plan.with_actions(_merge_row(row) for row in plan.actions)


def _merge_row(row: Iterable[Action | None]) -> list[Action | None]:
    """Merge the backwards of one rank, and drop its bubbles."""
    merged: list[Action | None] = []
    for action in row:
        last = merged[-1] if merged else None
        if action is not None and last is not None and _are_one(last, action):
            merged[-1] = Action(last.stage, Op.FULL_BACKWARD, last.microbatch)
        elif action is not None:
            merged.append(action)
    return merged


def _are_one(first: Action, second: Action) -> bool:
    ops = (first.op, second.op)
    same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
    return same and ops == (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def drop_bubbles(plan: Plan) -> Plan:
    """Return the plan without its bubbles."""
    return plan.with_actions([action for action in row if action is not None] for row in plan.actions)


def add_bubbles(plan: Plan, *, allow_stuck: bool = False) -> Plan:
    """Put a None wherever a rank waits if every action takes one slot; the ends of a message share a slot.

    A plan that cannot run to its end is returned as it is with `allow_stuck`.

    0F0 0B0   ->   0F0 ·   ·   0B0
    1F0 1B0        ·   1F0 1B0 ·
    """
    bare = drop_bubbles(plan)
    if allow_stuck and first_unknown(bare, Ledger(bare)) is not None:
        return plan
    placement = plan.placement if plan.has_transfers else None
    slot_of: dict[Action, int] = {}  # the slot from which on the result of an action is available
    free = [0] * len(bare.actions)
    rows: list[list[Action | None]] = [[] for _ in bare.actions]
    walk = Walk(bare)
    together: list[tuple[int, Action]] = []
    for rank, action in walk:
        together.append((rank, action))
        if action.op in MEETINGS and len(together) < len(walk.ranks_of(rank, action)):
            continue
        ready = [
            slot_of[need]
            for _, each in together
            for need in dependencies(each, plan.dataflow, placement)
            if need in slot_of
        ]
        start = max(ready + [free[where] for where, _ in together])
        for where, each in together:
            rows[where] += [None] * (start - len(rows[where])) + [each]
            free[where] = start + 1
            for leaf in each.leaves:
                for given in GIVES.get(leaf.op, (leaf.op,)):
                    slot_of[leaf._replace(op=given)] = start + 1
        together = []
    if walk.stuck and not allow_stuck:
        rank, slot = next(iter(walk.stuck.items()))
        raise PlanError(
            f"The plan '{plan.name}' cannot run past {bare.actions[rank][slot]} on rank {rank}. "
            "Call plan.validate() for the reason."
        )
    if walk.stuck:
        return plan
    slots = max(map(len, rows))
    return plan.with_actions(row + [None] * (slots - len(row)) for row in rows)


def receive_early(plan: Plan) -> Plan:
    """Put every receive right after the message before it, so that a message travels during other work.

    A receive passes computations only: the order of messages, which keeps a plan free of deadlock, stays as it is.

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
    """Put every receive right before its first use or the next send, so that it holds no buffer before.

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
    """Count the waiting receives that must come before an action; they keep their order."""
    if action.op in MEETINGS:
        return len(waiting)
    needs = dependencies(action, plan.dataflow, plan.placement)
    return max((place + 1 for place, receive in enumerate(waiting) if receive in needs), default=0)
