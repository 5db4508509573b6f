"""The lowering of any plan that runs gives a plan that runs and computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.schedule import Placement
from pipecut.schedule.action import Action, Op
from pipecut.schedule.lower import (
    add_bubbles,
    add_unshard_reshard,
    drop_bubbles,
    merge_backwards,
    receive_early,
    receive_late,
)
from pipecut.schedule.plan import Plan
from pipecut.schedule.rules import GIVES, dependencies
from pipecut.schedule.validate import find_faults
from tests.schedule.blocking_channels import RAN, execute
from tests.schedule.random_plans import Shape, random_plan
from tests.support.properties import examples

Pass = Callable[[Plan], Plan]


@st.composite
def plans(draw: st.DrawFn, *, transfers: bool, upkeep: bool, overlaps: bool = True) -> Plan:
    stages = draw(st.sampled_from([4, 3, 5, 6, 2, 1]))
    shape = Shape(
        stages,
        min(stages, draw(st.sampled_from([3, 2, 4, 1]))),
        draw(st.sampled_from([2, 3, 1])),
        training=draw(st.sampled_from([True, True, True, False])),
        transfers=transfers,
        upkeep=upkeep,
        overlaps=overlaps and draw(st.booleans()),
    )
    return random_plan(Random(draw(st.integers(0, 2**32 - 1))), shape)


def messages_of(plan: Plan) -> list[list[Action]]:
    meetings = [[a for a in row if a is not None and (a.is_transfer or a.op is Op.REDUCE_TIES)] for row in plan.actions]
    return [row for row in meetings if row]


ANY_RECEIVES = st.sampled_from(["as_sent", "early", "late"])


@settings(max_examples=examples(50))
@given(plans(transfers=False, upkeep=False), st.sampled_from([None, 1, 2, 3]), ANY_RECEIVES)
def test_a_lowered_plan_runs_and_computes_the_same(plan: Plan, max_held: int | None, receives: str) -> None:
    before = copy.deepcopy(plan)
    lowered = plan.lower(max_held=max_held, receives=receives)
    assert plan == before
    assert execute(lowered) == RAN
    assert find_faults(lowered) == []
    for row, new in zip(plan.actions, lowered.actions, strict=True):
        assert [a for a in row if a is not None] == [a for a in new if a is not None and a.is_compute]


@settings(max_examples=examples(25))
@given(plans(transfers=False, upkeep=False, overlaps=False), st.integers(1, 4))
def test_no_rank_holds_more_than_it_may_nor_gathers_in_vain(plan: Plan, max_held: int) -> None:
    for row in add_unshard_reshard(plan, max_held).actions:
        held: set[int] = set()
        for action in row:
            assert action is not None
            if action.op is Op.UNSHARD:
                assert action.stage not in held
                held.add(action.stage)
            elif action.op is Op.RESHARD:
                held.remove(action.stage)
            assert len(held) <= max_held
        assert not held


@settings(max_examples=examples(50))
@given(plans(transfers=True, upkeep=True), st.sampled_from([receive_early, receive_late]))
def test_moving_receives_keeps_a_plan_running(plan: Plan, move: Pass) -> None:
    before = copy.deepcopy(plan)
    moved = move(plan)
    assert plan == before
    assert execute(moved) == RAN
    assert find_faults(moved) == []
    assert messages_of(moved) == messages_of(plan)
    assert move(moved) == moved


@settings(max_examples=examples(50))
@given(plans(transfers=True, upkeep=True), plans(transfers=False, upkeep=True))
def test_merging_and_bubbles_keep_a_plan_running(lowered: Plan, unlowered: Plan) -> None:
    for plan in (lowered, unlowered):
        before = copy.deepcopy(plan)
        for change in (merge_backwards, add_bubbles, drop_bubbles):
            assert execute(change(plan)) == RAN
            assert find_faults(change(plan)) == []
        assert plan == before
        assert drop_bubbles(add_bubbles(plan)) == drop_bubbles(plan)
        assert len({len(row) for row in add_bubbles(plan).actions}) == 1


@settings(max_examples=examples(25))
@given(plans(transfers=True, upkeep=True), plans(transfers=False, upkeep=True))
def test_every_action_stands_in_the_first_column_in_which_it_can_run(lowered: Plan, unlowered: Plan) -> None:
    for plan in (lowered, unlowered):
        rows = add_bubbles(plan).actions
        placement = plan.placement if plan.has_transfers else None
        column_of: dict[Action, int] = {}
        for column, moment in enumerate(zip(*rows, strict=True)):
            present = [(rank, action) for rank, action in enumerate(moment) if action is not None]
            waited_for = {
                action: [column_of[need] for need in _made_before(action, plan, placement)] for _, action in present
            }
            for rank, action in present:
                together = [(r, a) for r, a in present if (r, a) == (rank, action) or _meet(a, action)]
                busy = any(column and rows[r][column - 1] is not None for r, _ in together)
                just_made = any(column - 1 in waited_for[a] for _, a in together)
                assert column == 0 or busy or just_made, f"{action} could have run before column {column}"
            for _, action in present:
                for leaf in action.leaves:
                    for gift in GIVES.get(leaf.op, (leaf.op,)):
                        column_of[leaf._replace(op=gift)] = column


def _made_before(action: Action, plan: Plan, placement: Placement | None) -> list[Action]:
    """What an action needs besides the other end of its own message, which happens at the same moment."""
    if action.op in (Op.RECV_F, Op.RECV_B):
        return []
    return list(dependencies(action, plan.dataflow, placement))


def _meet(one: Action, other: Action) -> bool:
    if one.is_transfer:
        return one.counterpart == other
    return one.op is Op.REDUCE_TIES and (one.op, one.microbatch) == (other.op, other.microbatch)
