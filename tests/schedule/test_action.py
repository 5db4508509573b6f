"""The text form of actions: there and back again for each of them, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule.action import Action, Op, overlap, parse_action, transfer

NUMBERS = st.one_of(st.integers(0, 20), st.integers(0, 999_999_999))
COMPUTED = st.sampled_from([Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD])
SENT = st.sampled_from([Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B])
WHOLE = st.sampled_from([Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD])
COMPUTATIONS = st.tuples(NUMBERS, COMPUTED, NUMBERS).map(lambda fields: Action(*fields))
TRANSFERS = st.tuples(SENT, NUMBERS, NUMBERS, NUMBERS).map(lambda fields: transfer(*fields))
WHOLE_STAGES = st.tuples(NUMBERS, WHOLE).map(lambda fields: Action(*fields))
TIES = st.tuples(NUMBERS, NUMBERS).map(lambda fields: Action(fields[0], Op.REDUCE_TIES, fields[1]))
OVERLAPS = st.lists(COMPUTATIONS, min_size=2, max_size=4).map(lambda parts: overlap(*parts))
ACTIONS = st.one_of(COMPUTATIONS, TRANSFERS, WHOLE_STAGES, TIES, OVERLAPS)

FORM = "Write it like 2F0, 1I3, 0UNSHARD, 2SEND_B2, 0SEND_F1->3 or (1F1;2B0)OVERLAP_F_B."
KNOWN = "Known are F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_TIES, OVERLAP_F_B."
PEER = "a peer is written -> after a send and <- after a receive, nowhere else."


@given(ACTIONS)
def test_every_action_is_read_as_it_was_written(action: Action) -> None:
    assert parse_action(repr(action)) == action
    assert parse_action(f"  {action!r}\t\n") == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Op.FORWARD, 0)),
        ("1I3", Action(1, Op.BACKWARD_INPUT, 3)),
        ("1W3", Action(1, Op.BACKWARD_WEIGHT, 3)),
        ("10B11", Action(10, Op.FULL_BACKWARD, 11)),
        ("0UNSHARD", Action(0, Op.UNSHARD)),
        ("3RESHARD", Action(3, Op.RESHARD)),
        ("3REDUCE_GRAD", Action(3, Op.REDUCE_GRAD)),
        ("3REDUCE_TIES1", Action(3, Op.REDUCE_TIES, 1)),
        ("2SEND_B2", Action(2, Op.SEND_B, 2)),
        ("0SEND_F1->3", Action(0, Op.SEND_F, 1, 3)),
        ("3RECV_F1<-0", Action(3, Op.RECV_F, 1, 0)),
        ("3SEND_B1->0", Action(3, Op.SEND_B, 1, 0)),
        ("(1F1;2B0)OVERLAP_F_B", overlap(Action(1, Op.FORWARD, 1), Action(2, Op.FULL_BACKWARD, 0))),
        (
            "(1F1;2I0;2W0)OVERLAP_F_B",
            overlap(
                *(Action(*part) for part in ((1, Op.FORWARD, 1), (2, Op.BACKWARD_INPUT, 0), (2, Op.BACKWARD_WEIGHT, 0)))
            ),
        ),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert repr(action) == text


@pytest.mark.parametrize("text", ["", " ", "\t \n"])
def test_blank_text_is_a_bubble(text: str) -> None:
    assert parse_action(text) is None


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("0SEND_F1->1", "0SEND_F1"),
        ("1RECV_F1<-0", "1RECV_F1"),
        ("1SEND_B1->0", "1SEND_B1"),
        ("0RECV_B1<-1", "0RECV_B1"),
        ("01F007", "1F7"),
        ("( 1F1 ; 2B0 )OVERLAP_F_B", "(1F1;2B0)OVERLAP_F_B"),
    ],
)
def test_two_ways_to_write_one_action(text: str, same: str) -> None:
    assert parse_action(text) == parse_action(same)
    assert repr(parse_action(text)) == same


@given(ACTIONS, st.text(min_size=1).filter(lambda text: text.strip() == text and not any(map(str.isdigit, text))))
def test_trailing_garbage_is_an_error(action: Action, garbage: str) -> None:
    with pytest.raises(PlanError, match="is not an action"):
        parse_action(f"{action!r}{garbage}")


@given(st.text(alphabet="0123FIWBSENDRCVUHATGOLP_();-<> ", max_size=24))
def test_any_text_is_an_action_that_can_be_written_again_or_an_error(text: str) -> None:
    try:
        action = parse_action(text)
    except PlanError:
        return
    assert action is None or parse_action(repr(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        *[
            "1F0garbage",
            "1F0 2F0",
            "1F0,2F0",
            "F0",
            "1",
            "1f0",
            "-1F0",
            "1F-1",
            "1F 0",
            "1F1.0",
            "1F0\n2",
            "1F\N{SUPERSCRIPT TWO}",
        ],
        *[
            "1F0->",
            "0SEND_F0->-1",
            "0SEND_F0->x",
            "0SEND_F0-3",
            "1OVERLAP_F_B",
            "0OVERLAP_F_B0",
            "1234567890F0",
            "1F1234567890",
        ],
        *["(1F1;2B0)OVERLAP", "(1F1;2B0) OVERLAP_F_B", "(1F1;2B0)", "((1F1;2B0)OVERLAP_F_B;1F0)OVERLAP_F_B"],
        "9" * 5000 + "F0",
    ],
)
def test_what_has_no_form_of_an_action(text: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_action(text)
    assert str(error.value) == f"'{text}' is not an action. {FORM}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1X0", f"there is no 'X'. {KNOWN}"),
        ("1SENDF0", f"there is no 'SENDF'. Did you mean 'SEND_F' or 'SEND_B'? {KNOWN}"),
        ("0REDUCE_GRADS", f"there is no 'REDUCE_GRADS'. Did you mean 'REDUCE_GRAD' or 'REDUCE_TIES'? {KNOWN}"),
        ("1F", "F needs the number of a microbatch, as in 1F0."),
        ("4RECV_B", "RECV_B needs the number of a microbatch, as in 4RECV_B0."),
        ("0REDUCE_TIES", "REDUCE_TIES needs the number of a tie, as in 0REDUCE_TIES0."),
        ("0UNSHARD3", "UNSHARD is for a whole stage; write 0UNSHARD."),
        ("7REDUCE_GRAD0", "REDUCE_GRAD is for a whole stage; write 7REDUCE_GRAD."),
        ("0F1->2", PEER),
        ("0UNSHARD->2", PEER),
        ("0REDUCE_TIES0<-2", PEER),
        ("0SEND_F1<-2", PEER),
        ("0RECV_F1->2", PEER),
    ],
)
def test_what_is_wrong_with_an_action(text: str, why: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_action(text)
    assert str(error.value) == f"'{text}' is not an action: {why}"


@pytest.mark.parametrize(
    "text",
    [
        "()OVERLAP_F_B",
        "(1F1;)OVERLAP_F_B",
        "(1F1;1SEND_F0)OVERLAP_F_B",
        "(0UNSHARD;0F0)OVERLAP_F_B",
    ],
)
def test_an_overlap_is_of_computations(text: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_action(text)
    assert str(error.value) == (
        f"'{text}' is not an action: an overlap has parts, each F, I, W or B, as in (1F1;2B0)OVERLAP_F_B."
    )


def test_the_two_ends_of_a_message_name_each_other() -> None:
    ends = {"0SEND_F5": "1RECV_F5", "3SEND_B0": "2RECV_B0", "0SEND_F1->3": "3RECV_F1<-0", "3SEND_B1->0": "0RECV_B1<-3"}
    for send, receive in ends.items():
        one, other = parse_action(send), parse_action(receive)
        assert one is not None
        assert other is not None
        assert (one.counterpart, other.counterpart) == (other, one)
        assert (one.other_stage, other.other_stage) == (other.stage, one.stage)


@given(TRANSFERS)
def test_the_other_end_of_the_other_end(action: Action) -> None:
    assert action.counterpart.counterpart == action
    assert action.counterpart.stage == action.other_stage


@given(ACTIONS)
def test_kinds_of_action(action: Action) -> None:
    assert action.is_compute == (str(action.op) in ("F", "I", "W", "B", "OVERLAP_F_B"))
    assert action.is_transfer == ("SEND" in str(action.op) or "RECV" in str(action.op))
    assert action.leaves == (action.parts or (action,))
