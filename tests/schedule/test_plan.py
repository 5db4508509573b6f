"""Plans from lists and dicts of actions: what is read from them, what is given, what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import Action, Op
from pipecut.schedule.plan import Plan
from pipecut.schedule.rules import Dataflow
from tests.schedule.plan_pictures import plan_of

TWO_RANKS = [["0F0", "0B0"], ["1F0", "1B0"]]
FORWARD = Action(0, Op.FORWARD, 0)


# ----------------------------------------------------------------------------------------------- what may be given


def test_from_a_list_from_a_dict_and_from_actions() -> None:
    plan = Plan.from_actions(TWO_RANKS)
    assert plan == Plan.from_actions({1: ["1F0", "1B0"], 0: ["0F0", "0B0"]})
    assert plan == Plan.from_actions({0: iter(TWO_RANKS[0]), 1: tuple(TWO_RANKS[1])})
    assert plan == Plan.from_actions([[FORWARD, " 0B0 "], ["1F0", Action(1, Op.FULL_BACKWARD, 0)]])
    assert plan.actions[0] == (FORWARD, Action(0, Op.FULL_BACKWARD, 0))


def test_none_and_blank_text_are_bubbles() -> None:
    plan = Plan.from_actions([["0F0", None, "", " ", "0B0"]])
    assert plan.actions == ((FORWARD, None, None, None, Action(0, Op.FULL_BACKWARD, 0)),)


def test_a_rank_that_is_left_out_does_nothing() -> None:
    plan = Plan.from_actions({0: ["0F0"], 2: ["1F0"]})
    assert plan.placement == Placement((0, 2))
    assert plan.actions[1] == ()
    assert plan.ranks == 3
    plan.validate()


def test_actions_for_the_first_ranks_only() -> None:
    plan = Plan.from_actions([["0F0", "0B0"]], placement=Placement.loop(ranks=2))
    assert plan.actions[1] == ()


def test_a_neighbour_that_is_named_is_the_same_as_one_that_is_not() -> None:
    named = Plan.from_actions([["0F0", Action(0, Op.SEND_F, 0, 1)], [Action(1, Op.RECV_F, 0, 0), "1F0"]])
    assert named == plan_of("0F0 0SEND_F0 \n 1RECV_F0 1F0")
    named.validate()


def test_a_plan_does_not_change() -> None:
    plan = Plan.from_actions(TWO_RANKS)
    with pytest.raises(FrozenInstanceError):
        plan.microbatches = 3  # type: ignore[misc]
    assert plan.with_actions([[FORWARD], []]) != plan
    assert plan == Plan.from_actions(TWO_RANKS)


# --------------------------------------------------------------------------------------------------- what is read


def test_what_is_not_given_is_read_from_the_actions() -> None:
    plan = Plan.from_actions([["0F0", "0F1", "3F0", "3F1"], ["1F0", "1F1", "2F0", "2F1"]])
    assert plan.name == "custom"
    assert plan.placement == Placement.v(ranks=2)
    assert (plan.ranks, plan.stages, plan.microbatches) == (2, 4, 2)
    assert plan.dataflow == Dataflow.chain(4)
    assert not plan.training
    assert not plan.has_transfers


def test_what_is_given_counts() -> None:
    flow = Dataflow.chain(2, ties=[(0, 1)])
    plan = Plan.from_actions(TWO_RANKS, name="mine", placement=Placement((1, 0)), microbatches=4, dataflow=flow)
    assert (plan.name, plan.placement, plan.microbatches, plan.dataflow) == ("mine", Placement((1, 0)), 4, flow)


def test_a_stage_is_where_its_forwards_are() -> None:
    strayed = Plan.from_actions([["1B0", "0F0", "0B0"], ["1F0"]])
    assert strayed.placement == Placement((0, 1))
    without_forward = Plan.from_actions([["0F0", "0B0"], ["1B0"]])
    assert without_forward.placement == Placement((0, 1))


def test_microbatches_and_stages_inside_overlaps_count() -> None:
    plan = Plan.from_actions([["0F0", "1F0", "(0F1;1B0)OVERLAP_F_B", "(1F1;0B0)OVERLAP_F_B", "1B1", "0B1"]])
    assert (plan.stages, plan.microbatches, plan.training) == (2, 2, True)
    plan.validate()


def test_skips_are_those_that_the_transfers_name() -> None:
    plan = plan_of("""
        0F0 0SEND_F0 0SEND_F0->2 0SEND_F0->3 0RECV_B0<-2 0RECV_B0 0B0
        1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0
        2RECV_F0<-0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2SEND_B0->0
        3RECV_F0<-0 3RECV_F0 3F0 3B0 3SEND_B0
    """)
    chain = {(0, 1), (1, 2), (2, 3)}
    assert plan.dataflow.activations == chain | {(0, 2), (0, 3)}
    assert plan.dataflow.gradients == chain | {(0, 2)}  # nothing comes back from stage 3
    assert plan.has_transfers


@pytest.mark.parametrize(
    ("row", "training"),
    [("0F0", False), ("0UNSHARD 0F0 0RESHARD", False), ("0F0 0B0", True), ("0F0 0I0", True), ("0F0 0W0", True)],
)
def test_a_plan_with_any_backward_is_for_training(row: str, training: bool) -> None:
    assert plan_of(row).training is training


def test_transfers_of_activations_do_not_make_a_plan_for_training() -> None:
    assert not plan_of("0F0 0SEND_F0 \n 1RECV_F0 1F0").training
    assert plan_of("0F0 0SEND_F0 0RECV_B0 \n 1RECV_F0 1F0 1SEND_B0").training


def test_the_dataflow_of_a_plan_can_be_another() -> None:
    flow = Dataflow.chain(2, root_inputs=[1])
    plan = Plan.from_actions(TWO_RANKS)
    assert plan.with_dataflow(flow).dataflow == flow
    assert plan.with_dataflow(flow).actions == plan.actions


def test_grid_shows_when_things_happen_and_wraps_on_demand() -> None:
    plan = Plan.from_actions([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    assert plan.grid().splitlines() == ["rank 0 │ 0F0 0F1 ·   0B0 ·   0B1", "rank 1 │ ·   1F0 1B0 1F1 1B1 ·"]
    assert plan.grid(width=24).splitlines() == [
        *["rank 0 │ 0F0 0F1 ·   0B0", "rank 1 │ ·   1F0 1B0 1F1", ""],
        *["rank 0 │ ·   0B1", "rank 1 │ 1B1 ·"],
    ]


def test_the_grid_of_a_plan_that_cannot_run_is_as_it_is_written() -> None:
    plan = plan_of("0B0 0F0 \n · 1F0 1B0")
    assert plan.grid().splitlines() == ["rank 0 │ 0B0 0F0", "rank 1 │ ·   1F0 1B0"]


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([], "The plan has no action: give each rank a list such as ['0F0', '0B0']."),
        ({}, "The plan has no action: give each rank a list such as ['0F0', '0B0']."),
        ([[], [None, ""]], "The plan has no action: give each rank a list such as ['0F0', '0B0']."),
        ({-1: ["0F0"]}, "The plan has a rank -1: ranks are numbered 0, 1, 2..."),
        ({"0": ["0F0"]}, "The plan has a rank '0': ranks are numbered 0, 1, 2..."),
        ([["0F0", 7]], "Rank 0, slot 1: 7 is not an action; give an Action, its text, or None."),
        (
            [["0F0"], ["1F0", "1Q0"]],
            "Rank 1, slot 1: '1Q0' is not an action: there is no 'Q'. Known are F, I, W, B, SEND_F, RECV_F, SEND_B, "
            "RECV_B, UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_TIES, OVERLAP_F_B.",
        ),
        (
            [["0F0", "2F0"]],
            "The plan has stage 2, but nothing of stage 1: add its actions, or number the stages 0, 1, 2... "
            "without gaps.",
        ),
        (
            [["0UNSHARD"]],
            "The plan computes nothing of stage 0: add its actions, or number the stages 0, 1, 2... without gaps.",
        ),
        (
            [["0F0", "0F11111111"]],
            "The plan has microbatch 11111111, but nothing of microbatch 1: add its actions, or number the "
            "microbatches 0, 1, 2... without gaps.",
        ),
        (
            [["0F1"]],
            "The plan has microbatch 1, but nothing of microbatch 0: add its actions, or number the microbatches "
            "0, 1, 2... without gaps.",
        ),
    ],
)
def test_actions_that_make_no_plan(actions: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_actions(actions)
    assert str(error.value) == message


@pytest.mark.parametrize("microbatches", [0, -1, True, 1.0, "2"])
def test_the_number_of_microbatches_is_a_whole_number_from_1_up(microbatches: Any) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_actions(TWO_RANKS, microbatches=microbatches)
    assert str(error.value) == f"microbatches={microbatches!r}: give an integer number of microbatches, 1 or more."


@pytest.mark.parametrize("stages", [1, 3])
def test_a_dataflow_of_another_number_of_stages(stages: int) -> None:
    message = f"The dataflow has {stages} stages, the plan 'custom' has 2."
    with pytest.raises(PlanError) as error:
        Plan.from_actions(TWO_RANKS, dataflow=Dataflow.chain(stages))
    assert str(error.value) == message
    with pytest.raises(PlanError) as error:
        Plan.from_actions(TWO_RANKS).with_dataflow(Dataflow.chain(stages))
    assert str(error.value) == message


def test_more_ranks_than_the_placement_has() -> None:
    message = (
        "The plan 'custom' has actions for 2 ranks, and its placement puts stages on 1: "
        "give every rank a stage and a list of actions."
    )
    with pytest.raises(PlanError) as error:
        Plan.from_actions(TWO_RANKS, placement=Placement((0, 0)))
    assert str(error.value) == message
    with pytest.raises(PlanError) as error:
        Plan.from_actions([["0F0"], []])
    assert str(error.value) == message


def test_a_placement_may_be_given_as_a_map_of_stages_to_ranks() -> None:
    plan = Plan.from_actions([["0F0", "2F0"], ["1F0"]], placement={0: 0, 1: 1, 2: 0})
    assert (
        plan.placement
        == Placement((0, 1, 0))
        == Plan.from_actions([["0F0", "2F0"], ["1F0"]], placement=[0, 1, 0]).placement
    )


@pytest.mark.parametrize(("what", "kind"), [("placement", "Placement"), ("dataflow", "Dataflow")])
def test_the_parts_of_a_plan_are_of_their_kind(what: str, kind: str) -> None:
    parts: dict[str, Any] = {"placement": Placement((0,)), "dataflow": Dataflow.chain(1), what: "x"}
    with pytest.raises(PlanError) as error:
        Plan("mine", microbatches=1, actions=((),), **parts)
    assert str(error.value) == f"The {what} of a plan is a {kind}, got 'x'."


def test_a_plan_is_not_saved_where_there_is_no_directory(tmp_path: Path) -> None:
    plan = Plan.from_actions([["0F0"]])
    with pytest.raises(PlanError, match="there is no directory '.*nowhere'; create it first, or give another path"):
        plan.save_csv(tmp_path / "nowhere" / "plan.csv")
    with pytest.raises(PlanError, match="that is a directory; give a file in it"):
        plan.save_csv(tmp_path)


def test_a_plan_whose_backwards_are_missing_is_not_taken_for_forward_only() -> None:
    assert not Plan.from_actions([["0F0"]]).training
    plan = Plan.from_actions([["0F0"]], training=True)
    with pytest.raises(PlanError, match="0B0: is missing"):
        plan.validate()
