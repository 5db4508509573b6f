"""Each kind of fault as a picture of a plan that has it, with all that is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import Action, Op, overlap
from pipecut.schedule.plan import Plan
from pipecut.schedule.registry import plan_for
from pipecut.schedule.rules import Dataflow
from pipecut.schedule.validate import Fault, find_faults, validate
from tests.schedule.blocking_channels import RAN, execute
from tests.schedule.plan_pictures import plan_of

TIED = Dataflow.chain(2, ties=[(0, 1)])
TIED_TWICE = Dataflow.chain(2, ties=[(0, 1), (0, 1)])


def check(plan: Plan, *expected: str) -> None:
    """The plan does not run, and the validator says why, all at once."""
    assert execute(plan) != RAN
    assert [str(fault) for fault in find_faults(plan)] == list(expected)


# ----------------------------------------------------------------------------------------------- what does not exist


def test_unknown_stage() -> None:
    check(
        plan_of("0F0 0B0 5F0 \n 1F0 1B0", placement=Placement.loop(2)),
        "rank 0, slot 2, 5F0: there is no stage 5; the stages are 0 to 1",
    )


def test_unknown_microbatch() -> None:
    check(
        plan_of("0F0 0F1 0B0 0B1 0F3", microbatches=2),
        "rank 0, slot 4, 0F3: there is no microbatch 3; the microbatches are 0 to 1",
    )


def test_wrong_rank() -> None:
    check(
        plan_of("0F0 0B0 1B0 \n 1F0", placement=Placement.loop(2)),
        "rank 0, slot 2, 1B0: stage 1 is on rank 1; move the action there",
        "rank 1, slot 1, 1B0: is missing (or 1I0 and 1W0); add it",
    )


def test_no_such_tie() -> None:
    check(
        plan_of("0F0 0B0 0REDUCE_TIES1 \n 1F0 1B0", dataflow=TIED),
        "rank 0, slot 2, 0REDUCE_TIES1: stage 0 has no tie 1; give the plan a dataflow with its ties",
    )


def test_the_sum_of_a_tie_that_the_stage_does_not_hold() -> None:
    check(
        plan_of(
            "0F0 2F0 2B0 0B0 2REDUCE_TIES0 \n 1F0 1B0 1REDUCE_TIES0",
            dataflow=Dataflow.chain(3, ties=[(0, 1)]),
        ),
        "rank 0, slot 4, 2REDUCE_TIES0: stage 2 has no tie 0; give the plan a dataflow with its ties",
        "rank 0, slot 5, 0REDUCE_TIES0: is missing, while others have theirs; add it",
        "rank 1, slot 2, 1REDUCE_TIES0: waits forever: rank 0 has no other end for it from there on; "
        "add it or remove this one",
    )


def test_transfer_to_an_unknown_stage() -> None:
    check(
        plan_of("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0"),
        "rank 1, slot 2, 1SEND_F0: there is no stage 2 at the other end; the stages are 0 to 1",
    )


def test_transfer_between_stages_of_one_rank() -> None:
    check(
        plan_of("0F0 0SEND_F0 1F0 1B0 0B0"),
        "rank 0, slot 1, 0SEND_F0: stages 0 and 1 are on the same rank, where nothing is sent; remove the transfer",
    )


def test_transfer_that_the_dataflow_does_not_have() -> None:
    check(
        plan_of("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0->1 \n 1RECV_F0 1F0 1B0 1SEND_B0"),
        "rank 0, slot 4, 0SEND_B0->1: no gradient goes between stages 0 and 1 that way; "
        "remove the transfer or add it to the dataflow",
    )


def malformed(*row: Action) -> Plan:
    """Actions that have no text form can only be made by hand."""
    return plan_of("0F0 0B0").with_actions([row])


FORWARD, BACKWARD = Action(0, Op.FORWARD, 0), Action(0, Op.FULL_BACKWARD, 0)


def test_actions_with_too_much_or_too_little() -> None:
    check(
        malformed(Action(0, Op.UNSHARD, None, 3), FORWARD, BACKWARD),
        "rank 0, slot 0, 0UNSHARD@3: UNSHARD has no peer; leave it out",
    )
    check(
        malformed(Action(0, Op.UNSHARD, 0), FORWARD, BACKWARD),
        "rank 0, slot 0, 0UNSHARD0: UNSHARD is for a whole stage; leave the microbatch out",
    )
    check(
        malformed(FORWARD, BACKWARD, Action(0, Op.FORWARD)),
        "rank 0, slot 2, 0F: needs the number of a microbatch, as in 0F0",
    )
    check(
        malformed(FORWARD, BACKWARD, overlap()),
        "rank 0, slot 2, -1OVERLAP_F_B: an overlap needs parts, as in (1F1;2B0)OVERLAP_F_B",
    )
    check(
        malformed(overlap(Action(0, Op.UNSHARD), FORWARD), BACKWARD),
        "rank 0, slot 0, 0UNSHARD: 0UNSHARD cannot be part of an overlap; give it a slot of its own",
    )


def test_a_send_inside_an_overlap() -> None:
    plan = plan_of("0F0 0SEND_F0 \n 1RECV_F0 1F0")
    forward, send = plan.actions[0]
    assert forward is not None
    assert send is not None
    check(
        plan.with_actions([[overlap(forward, send)], plan.actions[1]]),
        "rank 0, slot 0, (0F0;0SEND_F0)OVERLAP_F_B: 0SEND_F0 cannot be part of an overlap; give it a slot of its own",
        "rank 0, slot 1, 0SEND_F0: is missing; add it",
        "rank 1, slot 0, 1RECV_F0: waits forever: rank 0 has no other end for it from there on; "
        "add it or remove this one",
    )


def test_a_neighbour_that_is_named() -> None:
    plan = plan_of("0F0 0SEND_F0 \n 1RECV_F0 1F0")
    named = plan.with_actions([[FORWARD, Action(0, Op.SEND_F, 0, 1)], plan.actions[1]])
    assert str(find_faults(named)[0]) == (
        "rank 0, slot 1, 0SEND_F0->1: the neighbour is not named as a peer; write it 0SEND_F0"
    )


def test_backwards_in_a_plan_that_is_forward_only() -> None:
    """One of them was accepted once, and waited forever for a gradient that nobody missed."""
    plan = replace(plan_of("0F0 0B0 \n 1F0 1B0"), training=False)
    check(
        plan.with_actions([plan.actions[0], plan.actions[1][:1]]),
        "rank 0, slot 1, 0B0: the plan is forward only; remove it, or make the plan with training=True",
    )


# ------------------------------------------------------------------------------------------------------------- order


def test_too_early() -> None:
    check(plan_of("0B0 0F0"), "rank 0, slot 0, 0B0: needs 0F0, which comes after it, at slot 1; put that before")
    check(plan_of("0F0 0W0 0I0"), "rank 0, slot 1, 0W0: needs 0I0, which comes after it, at slot 2; put that before")
    check(
        plan_of("1F0 0F0 1I0 0I0 0W0 1W0"),
        "rank 0, slot 0, 1F0: needs 0F0, which comes after it, at slot 1; put that before",
    )


def test_before_it_in_the_same_overlap() -> None:
    check(
        plan_of("(0B0;0F0)OVERLAP_F_B"),
        "rank 0, slot 0, 0B0: needs 0F0, a later part of the same overlap; put that first, or before the overlap",
    )


def test_before_its_message_has_come() -> None:
    check(
        plan_of("0F0 0SEND_F0 0RECV_B0 0B0 \n 1F0 1RECV_F0 1B0 1SEND_B0"),
        "rank 1, slot 0, 1F0: needs 1RECV_F0, which comes after it, at slot 1; put that before",
    )
    check(
        plan_of("0SEND_F0 0F0 \n 1RECV_F0 1F0"),
        "rank 0, slot 0, 0SEND_F0: needs 0F0, which comes after it, at slot 1; put that before",
    )


def test_what_is_needed_is_nowhere() -> None:
    check(
        plan_of("0F0 0SEND_F0 0B0 \n 1RECV_F0 1F0 1B0"),
        "rank 0, slot 2, 0B0: needs 0RECV_B0, which is nowhere on this rank; add it before",
        "rank 0, slot 3, 0RECV_B0: is missing; add it",
        "rank 1, slot 3, 1SEND_B0: is missing; add it",
    )


def test_twice() -> None:
    check(plan_of("0F0 0F0 0B0"), "rank 0, slot 1, 0F0: done already by 0F0 at slot 0; remove one of the two")
    check(plan_of("0F0 0I0 0W0 0W0"), "rank 0, slot 3, 0W0: done already by 0W0 at slot 2; remove one of the two")
    check(plan_of("0F0 0B0 0W0"), "rank 0, slot 2, 0W0: done already by 0B0 at slot 1; remove one of the two")
    check(
        plan_of("0F0 (0B0;0F0)OVERLAP_F_B"),
        "rank 0, slot 1, 0F0: done already by 0F0 at slot 0; remove one of the two",
    )


def test_a_message_twice() -> None:
    check(
        plan_of("0F0 0SEND_F0 0SEND_F0 \n 1RECV_F0 1RECV_F0 1F0"),
        "rank 0, slot 2, 0SEND_F0: done already by 0SEND_F0 at slot 1; remove one of the two",
        "rank 1, slot 1, 1RECV_F0: done already by 1RECV_F0 at slot 0; remove one of the two",
    )


def test_missing() -> None:
    check(
        plan_of("0F0 0F1 0B0"),
        "rank 0, slot 3, 0B1: is missing (or 0I1 and 0W1); add it",
    )
    check(plan_of("0F0 0I0"), "rank 0, slot 2, 0W0: is missing; add it")
    check(plan_of("0F0 0F1 \n 1F0"), "rank 1, slot 1, 1F1: is missing; add it")


def test_a_stage_with_nothing_at_all() -> None:
    check(
        plan_of("0F0 \n 1F0", placement=Placement((0, 1, 0))),
        "rank 0, slot 1, 2F0: is missing; add it",
    )


# ------------------------------------------------------------------------------------------------------------ upkeep


def test_a_sharded_stage_is_used() -> None:
    check(
        plan_of("0F0 0UNSHARD 0B0 0RESHARD"),
        "rank 0, slot 0, 0F0: stage 0 is sharded here; put 0UNSHARD before it",
    )
    check(
        plan_of("0UNSHARD 0F0 0RESHARD 0I0 0UNSHARD 0W0 0RESHARD"),
        "rank 0, slot 3, 0I0: stage 0 is sharded here; put 0UNSHARD before it",
    )
    check(
        plan_of("0UNSHARD 0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1UNSHARD 1F1 1B1 0B1"),
        "rank 0, slot 2, 1F0: stage 1 is sharded here; put 1UNSHARD before it",
        "rank 0, slot 3, (0F1;1B0)OVERLAP_F_B: stage 1 is sharded here; put 1UNSHARD before it",
    )


def test_reduced_too_early() -> None:
    check(
        plan_of("0F0 0F1 0B0 0REDUCE_GRAD 0B1"),
        "rank 0, slot 3, 0REDUCE_GRAD: comes before 0B1 (slot 4) of the stage; put it after the last",
    )
    check(
        plan_of("0F0 0REDUCE_TIES0 0B0 \n 1F0 1B0 1REDUCE_TIES0", dataflow=TIED),
        "rank 0, slot 1, 0REDUCE_TIES0: comes before 0B0 (slot 2) of the stage; put it after the last",
    )


def test_not_everything_is_reduced() -> None:
    check(
        plan_of("0F0 1F0 1B0 1REDUCE_GRAD 0B0"),
        "rank 0, slot 5, 0REDUCE_GRAD: is missing, while others have theirs; add it",
    )
    check(
        plan_of("0F0 0B0 0REDUCE_TIES0 \n 1F0 1B0", dataflow=TIED),
        "rank 1, slot 2, 1REDUCE_TIES0: is missing, while others have theirs; add it",
        "rank 0, slot 2, 0REDUCE_TIES0: waits forever: rank 1 has no other end for it from there on; "
        "add it or remove this one",
    )


def test_reduced_twice() -> None:
    check(
        plan_of("0F0 0B0 0REDUCE_GRAD · 0REDUCE_GRAD"),
        "rank 0, slot 4, 0REDUCE_GRAD: done already at slot 2; remove one of the two",
    )
    check(
        plan_of("0F0 0B0 0REDUCE_TIES0 0REDUCE_TIES0 \n 1F0 1B0 1REDUCE_TIES0 1REDUCE_TIES0", dataflow=TIED),
        "rank 0, slot 3, 0REDUCE_TIES0: done already at slot 2; remove one of the two",
        "rank 1, slot 3, 1REDUCE_TIES0: done already at slot 2; remove one of the two",
    )


# ---------------------------------------------------------------------------------------------------------- deadlock


def test_a_message_without_its_other_end() -> None:
    check(
        plan_of("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0"),
        "rank 1, slot 3, 1SEND_B0: is missing; add it",
        "rank 0, slot 2, 0RECV_B0: waits forever: rank 1 has no other end for it from there on; "
        "add it or remove this one",
    )


def test_messages_in_different_orders() -> None:
    check(
        plan_of("0F0 0F1 0SEND_F0 0SEND_F1 \n 1RECV_F1 1RECV_F0 1F0 1F1"),
        "rank 0, slot 2, 0SEND_F0: ranks 0 and 1 have their messages in different orders: rank 1 first comes to "
        "1RECV_F1 (slot 0); put them in the same order on both",
        "rank 1, slot 0, 1RECV_F1: ranks 1 and 0 have their messages in different orders: rank 0 first comes to "
        "0SEND_F0 (slot 2); put them in the same order on both",
    )


def test_two_ranks_that_send_to_each_other() -> None:
    """It would run if sends were buffered."""
    check(
        plan_of("""
            0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
            1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
        """),
        "rank 0, slot 3, 0SEND_F1: ranks 0 and 1 have their messages in different orders: rank 1 first comes to "
        "1SEND_B0 (slot 3); put them in the same order on both",
        "rank 1, slot 3, 1SEND_B0: ranks 1 and 0 have their messages in different orders: rank 0 first comes to "
        "0SEND_F1 (slot 3); put them in the same order on both",
    )


def test_three_ranks_in_a_circle() -> None:
    """Every pair of ranks agrees on the order of its messages, and still nobody can go on."""
    check(
        plan_of("""
            0F0 0SEND_F0->2 0SEND_F0
            1RECV_F0 1F0 1SEND_F0
            2RECV_F0 2RECV_F0<-0 2F0
        """),
        "rank 0, slot 1, 0SEND_F0->2: deadlock: waits for rank 2, which waits at 2RECV_F0 (slot 0); "
        "move one of the two",
        "rank 1, slot 0, 1RECV_F0: deadlock: waits for rank 0, which waits at 0SEND_F0->2 (slot 1); "
        "move one of the two",
        "rank 2, slot 0, 2RECV_F0: deadlock: waits for rank 1, which waits at 1RECV_F0 (slot 0); move one of the two",
    )


def test_computations_in_a_circle() -> None:
    check(
        plan_of("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1"),
        "rank 0, slot 1, 0B0: deadlock: needs 1I0 of rank 1, which waits at 1F1 (slot 1); move one of the two",
        "rank 1, slot 1, 1F1: deadlock: needs 0F1 of rank 0, which waits at 0B0 (slot 1); move one of the two",
    )


def test_who_only_waits_for_ranks_in_a_circle_comes_after_them() -> None:
    plan = plan_of("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
        2F0 2F1 2B0 2B1
    """)
    check(
        plan,
        "rank 1, slot 1, 1B0: deadlock: needs 2I0 of rank 2, which waits at 2F1 (slot 1); move one of the two",
        "rank 2, slot 1, 2F1: deadlock: needs 1F1 of rank 1, which waits at 1B0 (slot 1); move one of the two",
        "rank 0, slot 2, 0B0: needs 1I0 of rank 1, which cannot go on at 1B0 (slot 1)",
    )
    assert [fault.cause for fault in find_faults(plan)] == [True, True, False]


def test_an_overlap_that_needs_what_comes_of_its_own_part() -> None:
    check(
        plan_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1 \n 1F0 1F1 1B0 1B1"),
        "rank 0, slot 1, (0F1;0B0)OVERLAP_F_B: deadlock: needs 1I0 of rank 1, which waits at 1F1 (slot 1); "
        "move one of the two",
        "rank 1, slot 1, 1F1: deadlock: needs 0F1 of rank 0, which waits at (0F1;0B0)OVERLAP_F_B (slot 1); "
        "move one of the two",
    )


def test_sums_of_ties_in_different_orders() -> None:
    check(
        plan_of("0F0 0B0 0REDUCE_TIES0 0REDUCE_TIES1 \n 1F0 1B0 1REDUCE_TIES1 1REDUCE_TIES0", dataflow=TIED_TWICE),
        "rank 0, slot 2, 0REDUCE_TIES0: ranks 0 and 1 have their messages in different orders: rank 1 first comes to "
        "1REDUCE_TIES1 (slot 2); put them in the same order on both",
        "rank 1, slot 2, 1REDUCE_TIES1: ranks 1 and 0 have their messages in different orders: rank 0 first comes to "
        "0REDUCE_TIES0 (slot 2); put them in the same order on both",
    )


def test_the_sum_of_a_tie_crosses_a_message() -> None:
    check(
        plan_of(
            """
            0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 2REDUCE_TIES0 0B0
            1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 3REDUCE_TIES0 1B0 1SEND_B0
            """,
            dataflow=Dataflow.chain(4, ties=[(2, 3)]),
        ),
        "rank 0, slot 8, 0RECV_B0: ranks 0 and 1 have their messages in different orders: rank 1 first comes to "
        "3REDUCE_TIES0 (slot 8); put them in the same order on both",
        "rank 1, slot 8, 3REDUCE_TIES0: ranks 1 and 0 have their messages in different orders: rank 0 first comes to "
        "0RECV_B0 (slot 8); put them in the same order on both",
    )


def test_the_sum_of_a_tie_crosses_a_computation() -> None:
    """Without transfers: rank 0 waits in the sum, rank 1 for a gradient that rank 0 makes after it."""
    edges = frozenset({(0, 1), (1, 2)})
    flow = Dataflow(3, edges, frozenset({(1, 2)}), ties=(frozenset({0, 1}),))
    check(
        plan_of("0F0 0B0 0REDUCE_TIES0 2F0 2B0 \n 1F0 1B0 1REDUCE_TIES0", dataflow=flow),
        "rank 0, slot 2, 0REDUCE_TIES0: deadlock: waits for rank 1, which waits at 1B0 (slot 1); move one of the two",
        "rank 1, slot 1, 1B0: deadlock: needs 2I0 of rank 0, which waits at 0REDUCE_TIES0 (slot 2); "
        "move one of the two",
    )


# ---------------------------------------------------------------------------------------------- what is as it should


@pytest.mark.parametrize(
    "plan",
    [
        plan_of("0F0"),
        plan_of("0F0 0SEND_F0 \n 1RECV_F0 1F0"),
        plan_of("0F0 0B0 \n 1F0 1B0"),
        plan_of("0F0 0I0 0F1 0I1 0W1 0W0"),
        plan_of("0RESHARD 0UNSHARD 0F0 0UNSHARD 0RESHARD 0RESHARD"),
        plan_of("0F0 1F0 (1B0;0B0)OVERLAP_F_B"),
        plan_of("(0F0;0B0)OVERLAP_F_B"),
        plan_of("0F0 0B0").with_actions([[overlap(FORWARD), BACKWARD]]),
        plan_of("0F0 1F0 0B0 1B0 0REDUCE_TIES0 1REDUCE_TIES0", dataflow=replace(TIED, gradients=frozenset())),
        plan_of("0F0 0B0 \n · \n 1F0 1B0", placement=Placement((0, 2))),
        plan_of("· 0F0 · 0B0 · \n 1F0 1B0 ·"),
        plan_of("0F0 0B0 \n 1F0 1B0", dataflow=TIED),
    ],
    ids=[
        *["one forward", "forward only with transfers", "without transfers", "weight gradients in another order"],
        *["gathered and freed in vain", "parts that need each other", "a whole stage in one overlap"],
        *["an overlap of one", "a tie on one rank", "a rank without stages", "bubbles", "ties that are not summed"],
    ],
)
def test_plans_that_run(plan: Plan) -> None:
    assert execute(plan) == RAN
    assert find_faults(plan) == []
    assert plan.validate() is plan


# ------------------------------------------------------------------------------------------------------- the message


def test_all_faults_in_one_message_with_the_first_marked() -> None:
    plan = plan_of("0F0 0F1 0SEND_F0 0SEND_F1 \n 1RECV_F1 1RECV_F0 1F0 1F0")
    with pytest.raises(PlanError) as error:
        validate(plan)
    assert str(error.value).splitlines() == [
        "The plan 'custom' cannot run: 4 faults.",
        "  rank 0, slot 2, 0SEND_F0: ranks 0 and 1 have their messages in different orders: rank 1 first comes to "
        "1RECV_F1 (slot 0); put them in the same order on both",
        "  rank 1, slot 0, 1RECV_F1: ranks 1 and 0 have their messages in different orders: rank 0 first comes to "
        "0SEND_F0 (slot 2); put them in the same order on both",
        "  rank 1, slot 3, 1F0: done already by 1F0 at slot 2; remove one of the two",
        "  rank 1, slot 4, 1F1: is missing; add it",
        "slots 0 to 3:",
        "rank 0 │ 0F0      0F1      [0SEND_F0] 0SEND_F1",
        "rank 1 │ 1RECV_F1 1RECV_F0 1F0        1F0",
    ]
    assert error.value.faults == tuple(find_faults(plan))
    assert error.value.faults[3] == Fault(1, 4, Action(1, Op.FORWARD, 1), "is missing; add it")


def test_the_place_of_what_is_missing_is_the_end_of_its_rank() -> None:
    with pytest.raises(PlanError) as error:
        plan_of("0F0 0F1 \n 1F0").validate()
    assert str(error.value).splitlines() == [
        "The plan 'custom' cannot run: 1 fault.",
        "  rank 1, slot 1, 1F1: is missing; add it",
        "slots 0 to 1:",
        "rank 0 │ 0F0 0F1",
        "rank 1 │ 1F0 [1F1?]",
    ]


def test_a_long_plan_is_shown_near_the_fault() -> None:
    row = [Action(0, Op.FORWARD, number) for number in range(40)]
    row[20], row[21] = row[21], Action(0, Op.FORWARD, 20)
    plan = Plan.from_actions([[*row[:20], row[19], *row[20:]]])
    with pytest.raises(PlanError) as error:
        plan.validate()
    assert str(error.value).splitlines()[-2:] == [
        "slots 14 to 26:",
        "rank 0 │ 0F14 0F15 0F16 0F17 0F18 0F19 [0F19] 0F21 0F20 0F22 0F23 0F24 0F25",
    ]


@pytest.mark.slow
def test_a_large_plan_in_which_everything_is_wrong() -> None:
    """Each fault once took a search through its rank: minutes for a plan of this size."""
    plan = plan_for("Interleaved1F1B", ranks=16, chunks=2, microbatches=256).lower()
    actions = sum(map(len, plan.actions))
    twice = find_faults(plan.with_actions([[*row, *row] for row in plan.actions]))
    assert len([fault for fault in twice if "done already" in fault.problem]) == actions
    backwards = find_faults(plan.with_actions([row[::-1] for row in plan.actions]))
    assert len({(fault.rank, fault.slot) for fault in backwards}) > actions / 2


def test_a_wide_plan_is_shown_near_the_fault() -> None:
    plan = Plan.from_actions([[f"{stage}F0"] * (2 if stage == 20 else 1) for stage in range(40)])
    with pytest.raises(PlanError) as error:
        plan.validate()
    lines = str(error.value).splitlines()[3:]
    assert [line.split()[1] for line in lines] == [str(rank) for rank in range(14, 27)]
    assert "rank 20 │ 20F0 [20F0]" in lines


def test_a_message_has_room_for_20_faults() -> None:
    with pytest.raises(PlanError) as error:
        plan_of("0F0", microbatches=30).validate()
    lines = str(error.value).splitlines()
    assert lines[0] == "The plan 'custom' cannot run: 29 faults."
    assert lines[20] == "  rank 0, slot 1, 0F20: is missing; add it"
    assert lines[21] == "  ... and 9 more, all in the error's `faults`."
    assert len(error.value.faults) == 29


def test_a_root_input_needs_no_forward_before_it_is_sent() -> None:
    flow = Dataflow.chain(3, root_inputs=[2])
    rows = "0SEND_F0->2 0F0 0SEND_F0 \n 1RECV_F0 1F0 1SEND_F0 \n 2RECV_F0<-0 2RECV_F0 2F0"
    assert find_faults(plan_of(rows, dataflow=flow)) == []
    skip = Dataflow.chain(3, skips=[(0, 2)])
    assert "0SEND_F0->2: needs 0F0" in str(find_faults(plan_of(rows, dataflow=skip))[0])


def test_a_rank_that_waits_for_nothing_closes_no_circle() -> None:
    """Without one send, the ranks behind it were called deadlocked, and the culprit came second."""
    plan = plan_for("1F1B", ranks=4, microbatches=4).lower()
    rows = [[action for action in row if repr(action) != "2SEND_B1"] for row in plan.actions]
    faults = find_faults(plan.with_actions(rows))
    assert str(faults[0]).endswith("2SEND_B1: is missing; add it")
    assert [fault.cause for fault in faults] == [True] + [False] * (len(faults) - 1)
