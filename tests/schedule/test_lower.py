"""Each pass of the lowering as a picture, before and after; and that none of them breaks a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import Op
from pipecut.schedule.lower import (
    add_bubbles,
    add_reduce_grad,
    add_reduce_ties,
    add_transfers,
    add_unshard_reshard,
    drop_bubbles,
    lower,
    merge_backwards,
    receive_early,
    receive_late,
)
from pipecut.schedule.plan import Plan
from pipecut.schedule.rules import Dataflow
from tests.schedule.blocking_channels import RAN, execute
from tests.schedule.plan_pictures import picture_of, plan_of, same

Pass = Callable[[Plan], Plan]


# --------------------------------------------------------------------------------------------------------- transfers


def test_transfers() -> None:
    plan = plan_of("""
        0F0  0F1  0B0  0B1
        1F0  1B0  1F1  1B1
    """)
    assert same(
        add_transfers(plan),
        """
        0F0 0SEND_F0               0F1 0SEND_F1              0RECV_B0  0B0                    0RECV_B1  0B1
            1RECV_F0          1F0      1RECV_F1      1B0     1SEND_B0        1F1         1B1  1SEND_B1
        """,
    )


def test_transfers_over_a_skip() -> None:
    plan = plan_of(
        """
        0F0  0B0
        1F0  1B0
        2F0  2B0
        """,
        dataflow=Dataflow.chain(3, skips=[(0, 2)]),
    )
    assert same(
        add_transfers(plan),
        """
        0F0 0SEND_F0 0SEND_F0->2                          0RECV_B0<-2      0RECV_B0  0B0
            1RECV_F0             1F0  1SEND_F0   1RECV_B0             1B0  1SEND_B0
                     2RECV_F0<-0      2RECV_F0  2F0 2B0 2SEND_B0 2SEND_B0->0
        """,
    )


def test_no_transfers_between_stages_of_one_rank() -> None:
    plan = plan_of("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """)
    assert same(
        add_transfers(plan),
        """
        0F0 0SEND_F0          3RECV_F0 3F0 3B0 3SEND_B0         0RECV_B0 0B0
            1RECV_F0 1F0 2F0  2SEND_F0         2RECV_B0 2B0 1B0 1SEND_B0
        """,
    )
    one_rank = plan_of("0F0 1F0 1B0 0B0")
    assert add_transfers(one_rank) == one_rank


def test_no_transfer_where_no_gradient_goes_back() -> None:
    edges = frozenset({(0, 1), (1, 2)})
    plan = plan_of("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0", dataflow=Dataflow(3, edges, frozenset({(1, 2)})))
    assert same(
        add_transfers(plan),
        """
        0F0 0SEND_F0 0B0
            1RECV_F0     1F0 1SEND_F0         1RECV_B0 1B0
                             2RECV_F0 2F0 2B0 2SEND_B0
        """,
    )


def test_an_input_of_the_model_goes_out_before_stage_0_runs() -> None:
    """Nothing computes it, so that it can travel while stage 0 computes."""
    plan = plan_of("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0", dataflow=Dataflow.chain(3, root_inputs=[2]))
    assert same(
        add_transfers(plan),
        """
        0SEND_F0->2 0F0 0SEND_F0                                   0RECV_B0 0B0
                        1RECV_F0 1F0 1SEND_F0           1RECV_B0 1B0 1SEND_B0
        2RECV_F0<-0                  2RECV_F0  2F0 2B0  2SEND_B0
        """,
    )


def test_an_input_of_the_model_goes_out_before_stage_0_if_it_is_needed_before() -> None:
    """A second branch, such as another encoder, may run while stage 0 has not begun."""
    apart = Dataflow(2, frozenset(), frozenset(), frozenset({1}))
    plan = plan_of("0F0 0F1 0B0 0B1 \n 1F1 1F0 1B1 1B0", dataflow=apart)
    assert same(
        add_transfers(plan),
        """
        0SEND_F0 0F0 0SEND_F1     0F1 0B0 0B1
        1RECV_F0     1RECV_F1 1F1 1F0 1B1 1B0
        """,
    )


def test_an_overlap_receives_before_and_sends_after_all_of_its_parts() -> None:
    plan = plan_of("""
        0F0  (0F1;0B0)OVERLAP_F_B 0B1
        1F0  1B0 1F1 1B1
    """)
    assert same(
        add_transfers(plan),
        """
        0F0 0SEND_F0             0RECV_B0 (0F1;0B0)OVERLAP_F_B 0SEND_F1         0RECV_B1 0B1
            1RECV_F0     1F0 1B0 1SEND_B0                      1RECV_F1 1F1 1B1 1SEND_B1
        """,
    )


def test_an_early_input_for_the_second_part_of_an_overlap_comes_before_the_overlap() -> None:
    """It was once put between the overlap and what its first part sends: after its use."""
    edges = frozenset({(0, 1), (1, 2)})
    flow = Dataflow(4, edges, edges, frozenset({3}))
    plan = plan_of(
        "0F0 0B0 \n (1F0;3F0)OVERLAP_F_B 1B0 3B0 \n 2F0 2B0", dataflow=flow, placement=Placement((0, 1, 2, 1))
    )
    late_first = plan_of(
        "1F0 (1B0;3F0)OVERLAP_F_B 3B0 \n 2F0 2B0 0F0 0B0 ",
        dataflow=Dataflow(4, frozenset({(1, 2)}), frozenset({(1, 2)}), frozenset({3})),
        placement=Placement((1, 0, 1, 0)),
    )
    for each in (plan, late_first):
        assert execute(add_transfers(each)) == RAN
    assert same(
        add_transfers(late_first),
        """
        1F0 1SEND_F0         1RECV_B0 3RECV_F0<-0 (1B0;3F0)OVERLAP_F_B 3B0
            2RECV_F0 2F0 2B0 2SEND_B0 0SEND_F0->3 0F0 0B0
        """,
    )


# ---------------------------------------------------------------------------------------------------------- sharding


@pytest.mark.parametrize(
    ("max_held", "after"),
    [
        (
            1,
            "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2B0 "
            "2RESHARD 1UNSHARD 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD",
        ),
        (
            2,
            "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD",
        ),
        (3, "0UNSHARD 1UNSHARD 2UNSHARD 0F0 1F0 2F0 2B0 2RESHARD 1B0 1RESHARD 0B0 0RESHARD"),
    ],
)
def test_unshard_and_reshard(max_held: int, after: str) -> None:
    assert same(add_unshard_reshard(plan_of("0F0 1F0 2F0 2B0 1B0 0B0"), max_held), after)


def test_each_rank_holds_its_own_stages() -> None:
    plan = plan_of(
        """
        0F0 2F0 · 2B0 0B0
        1F0
    """,
        placement=Placement((0, 1, 0)),
    )
    assert same(
        add_unshard_reshard(plan, 1),
        """
        0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2RESHARD 0UNSHARD 0B0 0RESHARD
        1UNSHARD 1F0 1RESHARD
        """,
    )


def test_an_overlap_holds_all_of_its_stages() -> None:
    plan = plan_of("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1")
    assert same(
        add_unshard_reshard(plan, 1),
        """
        0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 0UNSHARD (0F1;1B0)OVERLAP_F_B
        1RESHARD 0B0 0RESHARD 1UNSHARD 1F1 1B1 1RESHARD 0UNSHARD 0B1 0RESHARD
        """.replace("\n", " "),
    )


def test_reduce_grad_follows_the_last_weight_gradient_of_its_stage() -> None:
    plan = plan_of("0F0 0F1 1F0 1F1 1B0 1B1 0I0 0I1 0W0 · 0W1")
    assert same(add_reduce_grad(plan), "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0I0 0I1 0W0 · 0W1 0REDUCE_GRAD")


def test_reduce_grad_after_an_overlap() -> None:
    plan = plan_of("0F0 1F0 (1B0;0B0)OVERLAP_F_B")
    assert same(add_reduce_grad(plan), "0F0 1F0 (1B0;0B0)OVERLAP_F_B 1REDUCE_GRAD 0REDUCE_GRAD")


def test_a_forward_only_plan_has_no_gradients_to_reduce() -> None:
    plan = plan_of("0F0 0F1 \n 1F0 1F1", dataflow=Dataflow.chain(2, ties=[(0, 1)]))
    assert add_reduce_grad(plan) == plan
    assert add_reduce_ties(plan) == plan


def test_ties_between_ranks_are_summed_at_the_end_in_one_order() -> None:
    plan = plan_of(
        """
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
        """,
        dataflow=Dataflow.chain(4, ties=[(1, 3), (0, 3), (0, 2, 3)]),
    )
    assert same(
        add_reduce_ties(plan),
        """
        0F0 3F0 3B0 0B0 3REDUCE_TIES0 0REDUCE_TIES2
        1F0 2F0 2B0 1B0 1REDUCE_TIES0 2REDUCE_TIES2
        """,
    )


# --------------------------------------------------------------------------------------------- backwards and bubbles


def test_merge_backwards() -> None:
    plan = plan_of("0F0 0I0 · 0W0 0F1 0I1 1F0 0W1 1F1 1I1 1I0 1W0 1W1")
    assert same(merge_backwards(plan), "0F0 0B0 0F1 0I1 1F0 0W1 1F1 1I1 1B0 1W1")


@pytest.mark.parametrize("row", ["0F0 0F1 0I0 0I1 0W0 0W1", "0F0 1F0 1I0 0I0 1W0 0W0", "0F0 0W0 0I0"])
def test_merge_only_neighbours_of_one_stage_and_microbatch(row: str) -> None:
    assert same(merge_backwards(plan_of(row)), row)


def test_bubbles() -> None:
    plan = plan_of("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """)
    with_bubbles = add_bubbles(plan)
    assert same(
        with_bubbles,
        """
        0F0 0F1  ·  0B0  ·  0B1
         ·  1F0 1B0 1F1 1B1  ·
        """,
    )
    assert drop_bubbles(with_bubbles) == plan
    assert add_bubbles(with_bubbles) == with_bubbles


def test_the_two_ends_of_a_message_are_in_one_step() -> None:
    plan = plan_of("""
        0F0 0SEND_F0 0RECV_B0 0B0
        1RECV_F0 1F0 1B0 1SEND_B0
    """)
    assert same(
        add_bubbles(plan),
        """
        0F0 0SEND_F0  ·   ·  0RECV_B0 0B0
         ·  1RECV_F0 1F0 1B0 1SEND_B0  ·
        """,
    )


def test_bubbles_of_a_plan_that_cannot_run() -> None:
    plan = plan_of("0B0 0F0 \n · 1F0 1B0")
    with pytest.raises(PlanError) as error:
        add_bubbles(plan)
    assert str(error.value) == "The plan 'custom' cannot run past 0B0 on rank 0. Call plan.validate() for the reason."
    assert add_bubbles(plan, allow_stuck=True) == plan


# ---------------------------------------------------------------------------------------------------------- receives


def test_receives_early() -> None:
    plan = plan_of("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """)
    assert same(
        receive_early(plan),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1
        """,
    )


def test_receives_late() -> None:
    plan = plan_of("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """)
    assert same(
        receive_late(plan),
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
        """,
    )


def test_a_receive_stays_on_its_side_of_a_send() -> None:
    plan = plan_of("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0")
    assert receive_early(plan) == receive_late(plan) == plan


def test_late_receives_keep_their_order_even_if_the_second_is_needed_first() -> None:
    plan = plan_of("0F0 0SEND_F0 0F1 0SEND_F1 \n 1RECV_F0 1RECV_F1 1F1 1F0")
    assert receive_late(plan) == plan


TIED_IN_THE_MIDDLE = """
    0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 {sum_here} 0RECV_B0 0B0
    1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 {sum_there} 1B0 1SEND_B0
"""


def test_receives_do_not_pass_the_sum_of_a_tie() -> None:
    """They did once, and then one rank waited in the sum, the other for a message that came after it."""
    flow = Dataflow.chain(4, ties=[(2, 3)])
    sums = TIED_IN_THE_MIDDLE.format(sum_here="2REDUCE_TIES0", sum_there="3REDUCE_TIES0")
    plan = plan_of(sums, dataflow=flow)
    assert execute(plan) == RAN
    assert receive_early(plan) == receive_late(plan) == plan
    moved = picture_of(plan).replace("2REDUCE_TIES0 0RECV_B0", "0RECV_B0 2REDUCE_TIES0")
    assert execute(plan_of(moved, dataflow=flow)) != RAN


# -------------------------------------------------------------------------------------------------------- everything


def test_lower_puts_everything_together() -> None:
    plan = plan_of("0F0 0B0 \n 1F0 1B0", dataflow=Dataflow.chain(2, ties=[(0, 1)]))
    assert same(
        lower(plan, max_held=1),
        """
        0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD 0REDUCE_TIES0
        1RECV_F0 1UNSHARD 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1RESHARD 1REDUCE_TIES0
        """,
    )
    assert plan.lower(max_held=1) == lower(plan, max_held=1)


def test_lower_keeps_transfers_that_are_there() -> None:
    plan = plan_of("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0")
    assert lower(plan) == plan


def test_lower_keeps_upkeep_that_is_there() -> None:
    kept = plan_of("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD \n 1UNSHARD 1F0 1B0 1RESHARD 1REDUCE_GRAD")
    assert same(
        lower(kept, max_held=1),
        """
        0UNSHARD 0F0 0SEND_F0                   0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD
        1UNSHARD     1RECV_F0 1F0 1B0           1SEND_B0 1RESHARD 1REDUCE_GRAD
        """,
    )
    without_reductions = plan_of("0UNSHARD 0F0 0B0 0RESHARD")
    assert same(lower(without_reductions, max_held=1), "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD")
    without_sharding = plan_of("0F0 0B0 0REDUCE_GRAD")
    assert same(lower(without_sharding, max_held=1), "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD")


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (add_transfers, "The plan 'custom' has transfers already: add them to a plan of computations only."),
        (add_unshard_reshard, "The plan 'custom' has UNSHARD already: lower a plan that has none."),
        (add_reduce_grad, "The plan 'custom' has REDUCE_GRAD already: lower a plan that has none."),
    ],
)
def test_a_second_time_is_refused(again: Pass, message: str) -> None:
    plan = lower(plan_of("0F0 0B0 \n 1F0 1B0"), max_held=2)
    with pytest.raises(PlanError) as error:
        again(plan)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "again", [add_reduce_ties, merge_backwards, drop_bubbles, add_bubbles, receive_early, receive_late, lower]
)
def test_a_second_time_changes_nothing(again: Pass) -> None:
    plan = plan_of("0F0 0I0 0W0 0F1 0I1 0W1 \n 1F0 1I0 1F1 1I1 1W0 1W1", dataflow=Dataflow.chain(2, ties=[(0, 1)]))
    once = again(lower(plan))
    assert again(once) == once


def test_parameters_are_not_gathered_for_a_transfer() -> None:
    plan = plan_of("0F0 1F0 0SEND_F0->2 1SEND_F0 1RECV_B0 1B0 0B0 \n 2RECV_F0<-0 2RECV_F0 2F0 2B0 2SEND_B0")
    gathered = [action for action in add_unshard_reshard(plan, 1).actions[0] if action and action.op is Op.UNSHARD]
    assert [action.stage for action in gathered] == [0, 1, 0]


def test_a_bound_holds_before_an_overlap_too() -> None:
    """A later overlap made the stages that come before it be held early: three at a time, with a bound of two."""
    plan = plan_of("0F0 1F0 2F0 0F1 1F1 2B0 0F2 (2F1;1B0)OVERLAP_F_B 0B0 1F2 2F2 2B1 1B1 2B2 1B2 0B1 0B2")
    held: set[int] = set()
    for action in add_unshard_reshard(plan, 2).actions[0]:
        assert action is not None
        if action.op is Op.UNSHARD:
            held.add(action.stage)
        elif action.op is Op.RESHARD:
            held.remove(action.stage)
        assert len(held) <= 2, action


@pytest.mark.parametrize("max_held", [0, -1, True, 1.5, "2"])
def test_max_held_is_a_whole_number_from_1_up(max_held: Any) -> None:
    with pytest.raises(PlanError) as error:
        lower(plan_of("0F0 0B0"), max_held=max_held)
    assert str(error.value) == (
        f"max_held={max_held!r}: a rank must hold at least the stage that it runs; give 1 or more."
    )


def test_receives_has_a_few_values() -> None:
    with pytest.raises(PlanError) as error:
        lower(plan_of("0F0 0B0"), receives="erly")
    assert str(error.value) == (
        "receives='erly' is not known. Did you mean 'early'? Choose one of 'as_sent', 'early', 'late'."
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            plan_of("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1"),
            "The plan 'custom' cannot run past 0B0 on rank 0 (slot 1). Call plan.validate() for the reason.",
        ),
        (
            plan_of("0F0 0B0 0B0 \n 1F0 1B0"),
            "The plan 'custom' cannot run past 0B0 on rank 0 (slot 2). Call plan.validate() for the reason.",
        ),
        (
            plan_of("0F0 0F1 0B0 \n 1F0 1F1 1B0 1B1"),
            "The plan 'custom' is not complete. Call plan.validate() to see what is missing.",
        ),
        (
            plan_of("0F0 0F1 \n 1F0"),
            "The plan 'custom' is not complete. Call plan.validate() to see what is missing.",
        ),
    ],
    ids=["deadlock", "twice", "backward missing", "forward missing"],
)
def test_transfers_for_a_plan_that_cannot_run(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError) as error:
        add_transfers(plan)
    assert str(error.value) == message
