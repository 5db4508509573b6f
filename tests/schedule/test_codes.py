"""Actions as codes: there and back, and rows of them that read like tuples."""

from __future__ import annotations

import pickle
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import Action, Op, overlap, plan_for
from pipecut.schedule.action import MOST_NUMBERS, MOST_STAGES, CodedRow, code_of, decoded, first_code

stages = st.one_of(st.integers(0, 5), st.integers(0, MOST_STAGES - 1))
numbers = st.one_of(st.none(), st.integers(0, 5), st.integers(0, MOST_NUMBERS - 1))
OPS = [op for op in Op if op is not Op.OVERLAP_F_B]
actions = st.builds(Action, stages, st.sampled_from(OPS), numbers, st.one_of(st.none(), stages), st.just(()))


@given(st.lists(st.one_of(st.none(), actions)))
def test_a_row_reads_like_the_tuple_of_its_actions(given_actions: list[Action | None]) -> None:
    plain = tuple(given_actions)
    row = CodedRow(array("q", [code for code in map(code_of, plain) if code is not None]))
    assert tuple(row) == plain
    assert row == plain
    assert plain == row
    assert [row[slot] for slot in range(-len(row), len(row))] == [*plain, *plain]
    assert (row[1:], row[::-2], len(row), repr(row)) == (plain[1:], plain[::-2], len(plain), repr(plain))
    assert hash(row) == hash(plain)
    assert pickle.loads(pickle.dumps(row)) == row
    assert row.ops == {action.op for action in plain if action is not None}


def test_other_rows_are_not_equal() -> None:
    first = first_code(0, Op.FORWARD)
    row = CodedRow([first, first + 1])
    for other in (CodedRow([first]), (Action(0, Op.FORWARD, 0),), [*row]):
        assert row != other


@pytest.mark.parametrize(
    "action",
    [
        Action(-1, Op.FORWARD, 0),
        Action(MOST_STAGES, Op.FORWARD, 0),
        Action(0, Op.FORWARD, MOST_NUMBERS),
        Action(0, Op.SEND_F, 0, MOST_STAGES),
        Action(0, Op.SEND_F, 0, -1),
        overlap(Action(1, Op.FORWARD, 1), Action(2, Op.FULL_BACKWARD, 0)),
    ],
)
def test_actions_without_a_code(action: Action) -> None:
    assert code_of(action) is None


def test_none_is_a_bubble() -> None:
    assert decoded(code_of(None)) is None


def test_plans_are_equal_whatever_their_rows_are_made_of() -> None:
    plan = plan_for("1F1B", ranks=3, microbatches=4)
    plain = plan.with_actions([list(row) for row in plan.actions])
    assert plain == plan
    assert hash(plain) == hash(plan)
    assert (type(plan.actions[0]), type(plain.actions[0])) == (CodedRow, tuple)
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ranks": 1, "microbatches": MOST_NUMBERS}, "fewer than 2,097,151 microbatches, and 2,097,151 are asked for"),
        ({"ranks": MOST_STAGES, "microbatches": 1}, "fewer than 524,287 stages, and 524,287 are asked for: give fewer"),
    ],
)
def test_more_than_codes_can_hold(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_for("1F1B", **sizes)  # type: ignore[arg-type]
