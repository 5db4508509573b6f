"""Input and weight gradient in one where nothing stands between them."""

from __future__ import annotations

from collections.abc import Iterable

from ..action import Action, Op
from ..plan import Plan


def merge_backwards(plan: Plan) -> Plan:
    """Adjacent I and W of one stage and microbatch become B, which costs less than the two.

    0F0 0I0 0W0 0F1 0I1 1F0 0W1   ->   0F0 0B0 0F1 0I1 1F0 0W1
    """
    return plan.with_actions(merge_row(row) for row in plan.actions)


def merge_row(row: Iterable[Action | None]) -> list[Action | None]:
    """The actions of one rank, without bubbles."""
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
