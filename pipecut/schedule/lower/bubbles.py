"""Bubbles: the steps in which a rank has nothing to do if every action takes one step."""

from __future__ import annotations

from ...errors import PlanError
from ..action import TRANSFERS, Action, Op
from ..ledger import Ledger
from ..plan import Plan
from ..rules import GIVES, dependencies
from ..walk import Walk, first_unknown


def drop_bubbles(plan: Plan) -> Plan:
    """The plan without its bubbles."""
    return plan.with_actions([action for action in row if action is not None] for row in plan.actions)


def add_bubbles(plan: Plan, *, allow_stuck: bool = False) -> Plan:
    """The plan with a None wherever a rank waits, every action as soon as it can be; the ends of a message in one step.

    0F0 0B0   ->   0F0 ·   ·   0B0
    1F0 1B0        ·   1F0 1B0 ·
    """
    bare = drop_bubbles(plan)
    if allow_stuck and first_unknown(bare, Ledger(bare)) is not None:
        return plan
    placement = plan.placement if plan.has_transfers else None
    step_of: dict[Action, int] = {}  # the step after which what an action gives is there
    free = [0] * len(bare.actions)
    rows: list[list[Action | None]] = [[] for _ in bare.actions]
    walk = Walk(bare)
    together: list[tuple[int, Action]] = []
    for rank, action in walk:
        together.append((rank, action))
        if len(together) < _ends(plan, action):
            continue
        ready = [
            step_of[need]
            for _, each in together
            for need in dependencies(each, plan.dataflow, placement)
            if need in step_of
        ]
        start = max(ready + [free[where] for where, _ in together])
        for where, each in together:
            rows[where] += [None] * (start - len(rows[where])) + [each]
            free[where] = start + 1
            for leaf in each.leaves:
                for given in GIVES.get(leaf.op, (leaf.op,)):
                    step_of[leaf._replace(op=given)] = start + 1
        together = []
    if walk.stuck and not allow_stuck:
        rank, step = next(iter(walk.stuck.items()))
        raise PlanError(
            f"The plan '{plan.name}' cannot run past {bare.actions[rank][step]} on rank {rank}. "
            "plan.validate() tells why."
        )
    if walk.stuck:
        return plan
    steps = max(map(len, rows))
    return plan.with_actions(row + [None] * (steps - len(row)) for row in rows)


def _ends(plan: Plan, action: Action) -> int:
    """On how many ranks an action happens at once."""
    if action.op in TRANSFERS:
        return 2
    if action.op is Op.REDUCE_TIES:
        return len(plan.ranks_of_tie(action.microbatch or 0))
    return 1
