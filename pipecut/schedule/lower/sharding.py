"""Passes for sharded stages: gather and free their parameters, and reduce their gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...errors import PlanError
from ..action import COMPUTE, SENDS, Action, Op
from ..plan import Plan

_GIVES_WEIGHT_GRADIENT = frozenset({Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD})


def add_unshard_reshard(plan: Plan, max_held: int = 3) -> Plan:
    """Add UNSHARD of the next `max_held` stages that a rank will use, and RESHARD of the others.

    max_held=1      0F0 1F0 1B0   ->   0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD
    """
    if not isinstance(max_held, int) or isinstance(max_held, bool) or max_held < 1:
        raise PlanError(f"max_held={max_held!r}: a rank must hold at least the stage that it runs; give 1 or more.")
    _check_no_repetition(plan, Op.UNSHARD)
    stages_of = plan.placement.stages_of
    return plan.with_actions(shard_row(row, max_held, stages_of[rank]) for rank, row in enumerate(plan.actions))


def add_reduce_grad(plan: Plan) -> Plan:
    """Add REDUCE_GRAD of a stage right after its last weight gradient.

    0F0 0F1 0B0 0B1   ->   0F0 0F1 0B0 0B1 0REDUCE_GRAD
    """
    _check_no_repetition(plan, Op.REDUCE_GRAD)
    rows = []
    for rank, row in enumerate(plan.actions):
        after: dict[int, list[Action]] = {}
        for stage, slot in _last_uses(row, plan.placement.stages_of[rank], _GIVES_WEIGHT_GRADIENT).items():
            after.setdefault(_after_sends(row, slot), []).append(Action(stage, Op.REDUCE_GRAD))
        rows.append(_spliced(row, after))
    return plan.with_actions(rows)


def _after_sends(row: Sequence[Action | None], slot: int) -> int:
    """Return the slot after the sends of a computation: others wait for these, and nobody for reduced gradients."""
    slot += 1
    while slot < len(row) and (action := row[slot]) is not None and action.op in SENDS:
        slot += 1
    return slot


def _last_uses(row: Sequence[Action | None], stages: Sequence[int], ops: Collection[Op]) -> dict[int, int]:
    """Return the last slot in which each stage does one of these ops, read from the end of the row."""
    last: dict[int, int] = {}
    for slot in range(len(row) - 1, -1, -1):
        action = row[slot]
        for leaf in action.leaves if action is not None else ():
            if leaf.op in ops:
                last.setdefault(leaf.stage, slot)
        if len(last) == len(stages):
            break
    return last


def shard_row(row: Sequence[Action | None], max_held: int, stages: Sequence[int]) -> list[Action | None]:
    """Add UNSHARD and RESHARD to one rank's actions, and drop its bubbles: columns no longer mean the same moment."""
    actions = [action for action in row if action is not None]
    fits = len(stages) <= max_held
    wanted = _until_last_use(actions, stages) if fits else _next_stages(actions, max_held)
    held: list[int] = []
    before: dict[int, list[Action]] = {}
    for slot, next_held in wanted:
        moves = [Action(stage, Op.RESHARD) for stage in sorted(held) if stage not in next_held]
        moves += [Action(stage, Op.UNSHARD) for stage in next_held if stage not in held]
        held = next_held
        before[slot] = moves
    before.setdefault(len(actions), []).extend(Action(stage, Op.RESHARD) for stage in sorted(held))
    return _spliced(actions, before)


def _next_stages(actions: Sequence[Action], count: int) -> list[tuple[int, list[int]]]:
    """Return (first slot of a run, the next `count` stages used from any slot of that run on, soonest first)."""
    order: list[int] = []  # the stages used from here on, soonest first
    found: list[tuple[int, list[int]]] = []
    for slot in range(len(actions) - 1, -1, -1):
        action = actions[slot]
        if action.op not in COMPUTE:
            continue  # a transfer does not touch the parameters
        if not action.parts and order and order[0] == action.stage and len(found[-1][1]) <= count:
            found[-1] = (slot, found[-1][1])
            continue
        stages = list(dict.fromkeys(leaf.stage for leaf in action.leaves))
        order = stages + [stage for stage in order if stage not in stages]
        found.append((slot, order[: max(count, len(stages))]))
    return found[::-1]


def _until_last_use(actions: Sequence[Action], stages: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the same where all stages fit: each is held from the start, and until its last use."""
    last = _last_uses(actions, stages, COMPUTE)
    first: dict[int, int] = {}
    for slot, action in enumerate(actions):
        if action.op in COMPUTE:
            for leaf in action.leaves:
                first.setdefault(leaf.stage, slot)
        if len(first) == len(stages):
            break
    start = min(first.values(), default=0)
    changes = sorted({start, *(_next_use(actions, slot) for slot in last.values())})
    return [(slot, [stage for stage in first if last[stage] >= slot]) for slot in changes if slot < len(actions)]


def _next_use(actions: Sequence[Action], slot: int) -> int:
    """Return the first slot after one in which anything is computed."""
    return next((at for at in range(slot + 1, len(actions)) if actions[at].op in COMPUTE), len(actions))


def _spliced(row: Sequence[Action | None], before: dict[int, list[Action]]) -> list[Action | None]:
    """Return the row with the given actions inserted before the given slots."""
    result: list[Action | None] = []
    start = 0
    for slot in sorted(before):
        result += row[start:slot]
        result += before[slot]
        start = slot
    return result + list(row[start:])


def _check_no_repetition(plan: Plan, op: Op) -> None:
    if op in plan.ops:
        raise PlanError(f"The plan '{plan.name}' has {op} already: lower a plan that has none.")
