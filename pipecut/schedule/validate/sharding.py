"""Check sharding and reductions: parameters are gathered when used, gradients reduced once, after the last of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from ..action import Action, Op
from ..plan import Plan
from .order import Fault, PlanReading

_REDUCTIONS = frozenset({Op.REDUCE_GRAD, Op.REDUCE_TIES})


def sharding_faults(plan: Plan, reading: PlanReading) -> list[Fault]:
    """Return the faults of UNSHARD, RESHARD, REDUCE_GRAD and REDUCE_TIES, on every rank."""
    if not any(reading.whole_stage):
        return []
    faults: list[Fault] = []
    for rank, whole_stage in enumerate(reading.whole_stage):
        faults += _use_of_sharded(plan, rank, whole_stage, reading)
        faults += _reductions_too_early(plan, rank, whole_stage, reading)
    return [*faults, *_reductions_missing(plan, reading)]


def _use_of_sharded(
    plan: Plan, rank: int, whole_stage: list[tuple[int, Action]], reading: PlanReading
) -> Iterator[Fault]:
    """Find computations between a RESHARD, or the start, and the next UNSHARD of their stage."""
    end = len(plan.actions[rank])
    sharded_since = {action.stage: 0 for _, action in whole_stage if action.op in (Op.UNSHARD, Op.RESHARD)}
    closing = [(end, Action(stage, Op.UNSHARD)) for stage in sharded_since]
    for slot, action in (*whole_stage, *closing):
        stage = action.stage
        if action.op is Op.RESHARD:
            sharded_since.setdefault(stage, slot)
        elif action.op is Op.UNSHARD and stage in sharded_since:
            slots = reading.computed[stage]
            for place in range(bisect_left(slots, sharded_since.pop(stage)), bisect_right(slots, slot)):
                used = plan.actions[rank][slots[place]]
                assert used is not None  # a slot at which a stage computes
                problem = f"stage {stage} is sharded here; put {stage}UNSHARD before it"
                yield Fault(rank, slots[place], used, problem)


def _reductions_too_early(
    plan: Plan, rank: int, whole_stage: list[tuple[int, Action]], reading: PlanReading
) -> Iterator[Fault]:
    for slot, action in whole_stage:
        for stage in _reduced(plan, rank, action):
            last = reading.computed[stage][-1] if reading.computed[stage] else -1
            if last > slot:
                problem = f"comes before {plan.actions[rank][last]} (slot {last}) of the stage; put it after the last"
                yield Fault(rank, slot, action, problem)


def _reduced(plan: Plan, rank: int, action: Action) -> list[int]:
    """Return the stages of the rank whose gradients an action sums."""
    if action.op is Op.REDUCE_GRAD:
        return [action.stage]
    if action.op is Op.REDUCE_TIES:
        holders = plan.dataflow.ties[action.microbatch or 0]
        return [stage for stage in sorted(holders) if plan.placement.rank_of[stage] == rank]
    return []


def _reductions_missing(plan: Plan, reading: PlanReading) -> Iterator[Fault]:
    """Find reductions that are missing or double: a plan that reduces anything reduces everything, once."""
    rank_of = plan.placement.rank_of
    there: dict[tuple[Op, int, int | None], list[int]] = {}
    for rank, whole_stage in enumerate(reading.whole_stage):
        for slot, action in whole_stage:
            if action.op in _REDUCTIONS:
                there.setdefault(_reduction(rank, action), []).append(slot)
    kinds = {op for op, _, _ in there}
    wanted: list[tuple[int, Action]] = []
    if Op.REDUCE_GRAD in kinds:
        wanted += [(rank_of[stage], Action(stage, Op.REDUCE_GRAD)) for stage in range(plan.stages)]
    if Op.REDUCE_TIES in kinds:
        for number, holders in enumerate(plan.dataflow.ties):
            first = {rank_of[stage]: stage for stage in sorted(holders, reverse=True)}
            if len(first) > 1:
                wanted += [(rank, Action(stage, Op.REDUCE_TIES, number)) for rank, stage in first.items()]
    for rank, action in wanted:
        slots = there.get(_reduction(rank, action), [])
        if not slots:
            problem = "is missing, while others have theirs; add it"
            yield Fault(rank, len(plan.actions[rank]), action, problem)
        for slot in slots[1:]:
            again = plan.actions[rank][slot] or action
            yield Fault(rank, slot, again, f"done already at slot {slots[0]}; remove one of the two")


def _reduction(rank: int, action: Action) -> tuple[Op, int, int | None]:
    """Name the reduction on a rank: the gradients of a stage, or a tie, whichever of its stages stands for it."""
    return action.op, rank, action.stage if action.op is Op.REDUCE_GRAD else action.microbatch
