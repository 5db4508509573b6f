"""The order in which a plan can be done, and where it stops if it cannot."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import Action, Op, overlap
from pipecut.schedule.plan import Plan
from pipecut.schedule.rules import GIVES, Dataflow, dependencies
from pipecut.schedule.walk import Walk
from tests.schedule.blocking_channels import STUCK, execute
from tests.schedule.mutations import mutated
from tests.schedule.plan_pictures import plan_of
from tests.schedule.random_plans import Shape, random_plan

RANDOM_SEEDS = st.integers(0, 2**32 - 1)


def walked(plan: Plan) -> str:
    return " ".join(f"{rank}:{action}" for rank, action in Walk(plan))


def test_ranks_take_turns_as_far_as_the_dependencies_let_them() -> None:
    plan = plan_of("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    assert walked(plan) == "0:0F0 1:1F0 0:0F1 1:1B0 0:0B0 1:1F1 1:1B1 0:0B1"


def test_the_two_ends_of_a_message_come_together_the_send_first() -> None:
    plan = plan_of("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0")
    assert walked(plan) == "0:0F0 0:0SEND_F0 1:1RECV_F0 1:1F0 1:1B0 1:1SEND_B0 0:0RECV_B0 0:0B0"


def test_the_sum_of_a_tie_happens_on_all_its_ranks_at_once() -> None:
    flow = Dataflow.chain(3, ties=[(0, 2)])
    plan = plan_of("0F0 0B0 0REDUCE_TIES0 \n 1F0 1B0 \n 2F0 2B0 2REDUCE_TIES0", dataflow=flow)
    assert walked(plan) == "0:0F0 1:1F0 2:2F0 2:2B0 1:1B0 0:0B0 0:0REDUCE_TIES0 2:2REDUCE_TIES0"


def test_the_parts_of_an_overlap_are_done_together_or_not_at_all() -> None:
    both = overlap(Action(0, Op.FORWARD, 1), Action(0, Op.FULL_BACKWARD, 0))
    plan = Plan.from_actions([["0F0", both, "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    assert walked(plan) == "0:0F0 1:1F0 1:1B0 0:(0F1;0B0)OVERLAP_F_B 1:1F1 1:1B1 0:0B1"

    circle = Plan.from_actions([["0F0", both, "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    walk = Walk(circle)
    assert [repr(action) for _, action in walk] == ["0F0", "1F0"]  # 0F1 alone could have been done
    assert walk.stuck == {0: 1, 1: 1}


def test_bubbles_and_upkeep_pass_by() -> None:
    plan = Plan.from_actions([[None, "0UNSHARD", "0F0", None, "0B0", "0RESHARD", "0REDUCE_GRAD", None]])
    walk = Walk(plan)
    assert [repr(action) for _, action in walk] == ["0UNSHARD", "0F0", "0B0", "0RESHARD", "0REDUCE_GRAD"]
    assert walk.stuck == {}


def test_a_circle_of_three_ranks_is_stuck_at_known_places() -> None:
    """Each rank would first send its activation for a microbatch that it can have only later."""
    plan = plan_of("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1 \n 2F0 2B0 2F1 2B1")
    walk = Walk(plan)
    assert [repr(action) for _, action in walk] == ["0F0", "1F0", "2F0", "2B0"]
    assert walk.stuck == {0: 1, 1: 1, 2: 2}


def test_a_send_waits_for_its_value() -> None:
    walk = Walk(plan_of("0SEND_F0 0F0 \n 1RECV_F0 1F0"))
    assert list(walk) == []
    assert walk.stuck == {0: 0, 1: 0}


@pytest.mark.parametrize("wrong", ["2F0", "0F5", "1F0", "0SEND_F0->9", "0SEND_B0", "0REDUCE_TIES0"])
def test_an_action_that_is_none_of_the_plan_s(wrong: str) -> None:
    rows = [["0F0", "0B0", wrong], ["1F0", "1B0"]]
    plan = Plan.from_actions(rows, placement=Placement.loop(ranks=2), microbatches=1)
    with pytest.raises(PlanError) as error:
        Walk(plan)
    action = plan.actions[0][2]
    assert str(error.value) == (
        f"The plan 'custom' cannot run: rank 0 cannot do {action} (slot 2). Call plan.validate() for the reason."
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages = draw(st.integers(1, 5))
    flags = [draw(st.booleans()) for _ in range(4)]
    shape = Shape(stages, draw(st.integers(1, stages)), draw(st.integers(1, 3)), True, *flags)
    return random_plan(Random(draw(RANDOM_SEEDS)), shape)


@given(plans())
def test_a_walk_does_everything_once_and_in_order(plan: Plan) -> None:
    walk = Walk(plan)
    visited = list(walk)
    assert walk.stuck == {}
    for rank, row in enumerate(plan.actions):
        assert [action for where, action in visited if where == rank] == [a for a in row if a is not None]
    time = count()
    when: dict[Action, int] = {}
    placement = plan.placement if plan.has_transfers else None
    for _, action in visited:
        for need in dependencies(action, plan.dataflow, placement):
            assert need in when, f"{action} comes before {need}"
        for leaf in action.leaves:
            for gift in GIVES.get(leaf.op, (leaf.op,)):
                when[leaf._replace(op=gift)] = next(time)


@given(plans(), st.lists(RANDOM_SEEDS, min_size=1, max_size=3))
def test_a_walk_stops_where_execution_is_stuck(plan: Plan, changes: list[int]) -> None:
    for change in changes:
        plan = mutated(Random(change), plan)
    if execute(plan).startswith(STUCK):
        try:
            walk = Walk(plan)
        except PlanError:
            return  # something unknown comes later, where execution never got to
        assert len(list(walk)) < sum(map(len, plan.actions))
        assert walk.stuck
