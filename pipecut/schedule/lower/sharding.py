"""When a rank gathers and frees the parameters of its stages, and when it reduces their gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...errors import PlanError
from ..action import COMPUTE, SENDS, Action, Op
from ..plan import Plan

GIVES_WEIGHT_GRADIENT = frozenset({Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD})


def add_unshard_reshard(plan: Plan, max_held: int = 3) -> Plan:
    """UNSHARD the next `max_held` stages that a rank will use, and RESHARD the others. An overlap holds all of its own.

    max_held=1      0F0 1F0 1B0   ->   0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD
    """
    if not isinstance(max_held, int) or isinstance(max_held, bool) or max_held < 1:
        raise PlanError(f"max_held={max_held!r}: a rank must hold at least the stage that it runs; give 1 or more.")
    _refuse_second_time(plan, Op.UNSHARD)
    stages_of = plan.placement.stages_of
    return plan.with_actions(shard_row(row, max_held, stages_of[rank]) for rank, row in enumerate(plan.actions))


def add_reduce_grad(plan: Plan) -> Plan:
    """REDUCE_GRAD of a stage right after its last weight gradient.

    0F0 0F1 0B0 0B1   ->   0F0 0F1 0B0 0B1 0REDUCE_GRAD
    """
    _refuse_second_time(plan, Op.REDUCE_GRAD)
    rows = []
    for rank, row in enumerate(plan.actions):
        after: dict[int, list[Action]] = {}
        for stage, step in _last_uses(row, plan.placement.stages_of[rank], GIVES_WEIGHT_GRADIENT).items():
            after.setdefault(_after_sends(row, step), []).append(Action(stage, Op.REDUCE_GRAD))
        rows.append(spliced(row, after))
    return plan.with_actions(rows)


def _after_sends(row: Sequence[Action | None], step: int) -> int:
    """The place after what a computation sends: others wait for that, and nobody for the reduced gradients."""
    step += 1
    while step < len(row) and (action := row[step]) is not None and action.op in SENDS:
        step += 1
    return step


def _last_uses(row: Sequence[Action | None], stages: Sequence[int], ops: Collection[Op]) -> dict[int, int]:
    """The last step at which each stage does one of these, from the end of the row until all are found."""
    last: dict[int, int] = {}
    for step in range(len(row) - 1, -1, -1):
        action = row[step]
        for leaf in action.leaves if action is not None else ():
            if leaf.op in ops:
                last.setdefault(leaf.stage, step)
        if len(last) == len(stages):
            break
    return last


def shard_row(row: Sequence[Action | None], max_held: int, stages: Sequence[int]) -> list[Action | None]:
    """One rank's actions with UNSHARD and RESHARD; bubbles go, for the columns no longer mean the same moment."""
    actions = [action for action in row if action is not None]
    fits = len(stages) <= max_held
    wanted = _until_last_use(actions, stages) if fits else _next_stages(actions, max_held)
    held: list[int] = []
    before: dict[int, list[Action]] = {}
    for step, next_held in wanted:
        moves = [Action(stage, Op.RESHARD) for stage in sorted(held) if stage not in next_held]
        moves += [Action(stage, Op.UNSHARD) for stage in next_held if stage not in held]
        held = next_held
        before[step] = moves
    before.setdefault(len(actions), []).extend(Action(stage, Op.RESHARD) for stage in sorted(held))
    return spliced(actions, before)


def _next_stages(actions: Sequence[Action], count: int) -> list[tuple[int, list[int]]]:
    """(first step of a run, the next `count` stages that are used from any step of that run on, soonest first)."""
    order: list[int] = []  # the stages used from here on, soonest first
    found: list[tuple[int, list[int]]] = []
    for step in range(len(actions) - 1, -1, -1):
        action = actions[step]
        if action.op not in COMPUTE:
            continue  # a transfer does not touch the parameters
        if not action.parts and order and order[0] == action.stage and len(found[-1][1]) <= count:
            found[-1] = (step, found[-1][1])
            continue
        stages = list(dict.fromkeys(leaf.stage for leaf in action.leaves))
        order = stages + [stage for stage in order if stage not in stages]
        found.append((step, order[: max(count, len(stages))]))
    return found[::-1]


def _until_last_use(actions: Sequence[Action], stages: Sequence[int]) -> list[tuple[int, list[int]]]:
    """The same where all stages fit: each is held from the start, and until its last use."""
    last = _last_uses(actions, stages, COMPUTE)
    first: dict[int, int] = {}
    for step, action in enumerate(actions):
        if action.op in COMPUTE:
            for leaf in action.leaves:
                first.setdefault(leaf.stage, step)
        if len(first) == len(stages):
            break
    start = min(first.values(), default=0)
    changes = sorted({start, *(_next_use(actions, step) for step in last.values())})
    return [(step, [stage for stage in first if last[stage] >= step]) for step in changes if step < len(actions)]


def _next_use(actions: Sequence[Action], step: int) -> int:
    """The first step after one at which anything is computed."""
    return next((at for at in range(step + 1, len(actions)) if actions[at].op in COMPUTE), len(actions))


def spliced(row: Sequence[Action | None], before: dict[int, list[Action]]) -> list[Action | None]:
    """The row with the given actions put in before the given steps."""
    result: list[Action | None] = []
    start = 0
    for step in sorted(before):
        result += row[start:step]
        result += before[step]
        start = step
    return result + list(row[start:])


def _refuse_second_time(plan: Plan, op: Op) -> None:
    if op in plan.ops:
        raise PlanError(f"The plan '{plan.name}' has {op} already: lower a plan that has none.")
