"""What every kind of action needs, over neighbours, skips and root inputs, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import Action, Op, parse_action
from pipecut.schedule.rules import Dataflow, dependencies

APART = Placement.loop(ranks=4)  # every stage on a rank of its own
CHAIN = Dataflow.chain(4)
SKIP = Dataflow.chain(4, skips=[(0, 2), (1, 3)])
#        an input of the model goes to stages 2 and 3, the latter besides a skip
ROOTED = Dataflow.chain(4, skips=[(0, 3)], root_inputs=[2, 3])
#        what stage 0 gives to stage 2 needs no gradient
FROZEN = Dataflow(3, CHAIN.activations & {(0, 1), (1, 2)} | {(0, 2)}, frozenset({(0, 1), (1, 2)}))


def needs(text: str, flow: Dataflow, placement: Placement | None = None) -> str:
    action = parse_action(text)
    assert action is not None
    return " ".join(map(repr, dependencies(action, flow, placement)))


@pytest.mark.parametrize(
    ("action", "directly", "by_message"),
    [
        ("0F5", "", ""),
        ("1F5", "0F5", "1RECV_F5"),
        ("3F5", "2F5", "3RECV_F5"),
        ("3B5", "3F5", "3F5"),
        ("3I5", "3F5", "3F5"),
        ("1B5", "1F5 2I5", "1F5 1RECV_B5"),
        ("1I5", "1F5 2I5", "1F5 1RECV_B5"),
        ("0B5", "0F5 1I5", "0F5 0RECV_B5"),
        ("1W5", "1I5", "1I5"),
        ("1SEND_F5", "1F5", "1F5"),
        ("1SEND_B5", "1I5", "1I5"),
        ("1RECV_F5", "0SEND_F5", "0SEND_F5"),
        ("1RECV_B5", "2SEND_B5", "2SEND_B5"),
        ("1UNSHARD", "", ""),
        ("1RESHARD", "", ""),
        ("1REDUCE_GRAD", "", ""),
        ("1REDUCE_TIES0", "", ""),
        # An overlap needs what its parts do not give each other.
        ("(1F1;2B0)OVERLAP_F_B", "0F1 2F0 3I0", "1RECV_F1 2F0 2RECV_B0"),
        ("(1F0;2F0)OVERLAP_F_B", "0F0", "1RECV_F0 2RECV_F0"),  # on one rank the second part takes it from the first
        ("(3I0;3W0)OVERLAP_F_B", "3F0", "3F0"),
        ("(3B0;2B0)OVERLAP_F_B", "3F0 2F0", "3F0 2F0 2RECV_B0"),
        ("(1F1;1F1)OVERLAP_F_B", "0F1", "1RECV_F1"),
    ],
)
def test_chain(action: str, directly: str, by_message: str) -> None:
    assert needs(action, CHAIN) == directly
    assert needs(action, CHAIN, APART) == by_message


@pytest.mark.parametrize(
    ("action", "directly", "by_message"),
    [
        ("1F0", "0F0", "1RECV_F0"),
        ("2F0", "0F0 1F0", "2RECV_F0<-0 2RECV_F0"),
        ("3F0", "1F0 2F0", "3RECV_F0<-1 3RECV_F0"),
        ("0B0", "0F0 1I0 2I0", "0F0 0RECV_B0 0RECV_B0<-2"),
        ("1I0", "1F0 2I0 3I0", "1F0 1RECV_B0 1RECV_B0<-3"),
        ("2B0", "2F0 3I0", "2F0 2RECV_B0"),
        ("0W0", "0I0", "0I0"),
        ("0SEND_F0->2", "0F0", "0F0"),
        ("2RECV_F0<-0", "0SEND_F0->2", "0SEND_F0->2"),
        ("2SEND_B0->0", "2I0", "2I0"),
        ("0RECV_B0<-2", "2SEND_B0->0", "2SEND_B0->0"),
    ],
)
def test_skips(action: str, directly: str, by_message: str) -> None:
    assert needs(action, SKIP) == directly
    assert needs(action, SKIP, APART) == by_message


@pytest.mark.parametrize(
    ("action", "directly", "by_message"),
    [
        ("2F0", "1F0", "2RECV_F0<-0 2RECV_F0"),  # the input is there from the start, but has to come over
        ("3F0", "0F0 2F0", "3RECV_F0<-0 3RECV_F0"),  # one message for the skip and the input
        ("0SEND_F0->2", "", ""),  # an input of the model is made by nobody
        ("0SEND_F0->3", "0F0", "0F0"),
        ("0B0", "0F0 1I0 3I0", "0F0 0RECV_B0 0RECV_B0<-3"),  # and no gradient goes back for it
    ],
)
def test_root_inputs(action: str, directly: str, by_message: str) -> None:
    assert needs(action, ROOTED) == directly
    assert needs(action, ROOTED, APART) == by_message


def test_no_gradient_goes_back_where_none_is_needed() -> None:
    placement = Placement.loop(ranks=3)
    assert needs("2F0", FROZEN) == "0F0 1F0"
    assert needs("0B0", FROZEN) == "0F0 1I0"
    assert needs("0B0", FROZEN, placement) == "0F0 0RECV_B0"
    assert FROZEN.messages(Op.FORWARD, 0, placement) == ((Op.SEND_F, 1), (Op.SEND_F, 2))
    assert FROZEN.messages(Op.BACKWARD_INPUT, 2, placement) == ((Op.SEND_B, 1),)


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    folded = Placement.v(ranks=2)  # stages 1 and 2 on rank 1, stages 0 and 3 on rank 0
    assert needs("2F0", SKIP, folded) == "1F0 2RECV_F0<-0"
    assert needs("3F0", SKIP, folded) == "3RECV_F0<-1 3RECV_F0"
    assert needs("1B0", SKIP, folded) == "1F0 2I0 1RECV_B0<-3"
    assert needs("3F0", ROOTED, folded) == "0F0 3RECV_F0"
    assert SKIP.messages(Op.FORWARD, 1, folded) == ((Op.SEND_F, 3),)
    assert SKIP.receives(Op.FULL_BACKWARD, 1, folded) == ((Op.RECV_B, 3),)


def test_a_weight_gradient_stays_at_home() -> None:
    assert CHAIN.messages(Op.BACKWARD_WEIGHT, 1, APART) == ()
    assert CHAIN.receives(Op.BACKWARD_WEIGHT, 1, APART) == ()


def test_every_need_of_a_receive_is_what_its_maker_sends() -> None:
    """What a stage receives is what another one sends: the two lists tell the same story."""
    for flow in (CHAIN, SKIP, ROOTED):
        for placement in (APART, Placement.v(ranks=2), Placement((1, 0, 1, 0)), Placement.loop(1, 4)):
            sent, received = set(), set()
            for op in (Op.FORWARD, Op.BACKWARD_INPUT):
                for stage in range(4):
                    sent |= {Action(stage, send, 0, other) for send, other in flow.messages(op, stage, placement)}
                    received |= {
                        Action(stage, receive, 0, other) for receive, other in flow.receives(op, stage, placement)
                    }
            assert {action.counterpart for action in received} == {end.counterpart.counterpart for end in sent}


def test_dataflow_by_stage() -> None:
    assert SKIP.makers == ((), (0,), (0, 1), (1, 2))
    assert SKIP.users == ((1, 2), (2, 3), (3,), ())
    assert SKIP.gradient_givers == SKIP.users
    assert SKIP.gradient_takers == SKIP.makers
    assert FROZEN.gradient_givers == ((1,), (2,), ())
    assert FROZEN.gradient_takers == ((), (0,), (1,))
    assert Dataflow.chain(1).makers == ((),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Dataflow.chain(3, skips=[(0, 5)]),
            "The dataflow has an edge from stage 0 to stage 5: a value goes to a later stage, "
            "and the stages are 0 to 2.",
        ),
        (
            lambda: Dataflow.chain(3, skips=[(2, 0)]),
            "The dataflow has an edge from stage 2 to stage 0: a value goes to a later stage, "
            "and the stages are 0 to 2.",
        ),
        (
            lambda: Dataflow.chain(3, skips=[(1, 1)]),
            "The dataflow has an edge from stage 1 to stage 1: a value goes to a later stage, "
            "and the stages are 0 to 2.",
        ),
        (
            lambda: Dataflow(3, frozenset({(0, 1)}), frozenset({(0, 1), (0, 2)})),
            "The dataflow has a gradient for (0, 2), but no activation: add that, or remove it.",
        ),
        (
            lambda: Dataflow.chain(3, root_inputs=[1, 3]),
            "The dataflow has a root input at stage 3: the stages are 0 to 2.",
        ),
        (
            lambda: Dataflow.chain(3, ties=[[0, 1], [-1, 2]]),
            "The dataflow has a tie at stage -1: the stages are 0 to 2.",
        ),
    ],
)
def test_a_dataflow_is_between_stages_that_exist(make: Callable[[], Dataflow], message: str) -> None:
    with pytest.raises(PlanError) as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize("stage", [-1, 3])
def test_an_action_of_no_stage_has_no_dependencies(stage: int) -> None:
    with pytest.raises(PlanError) as error:
        dependencies(Action(stage, Op.FORWARD, 0), Dataflow.chain(3))
    assert str(error.value) == f"{stage}F0 is of no stage: the dataflow has stages 0 to 2."
