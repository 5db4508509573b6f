"""Big plans, looked at with all ranks together, against the same plans action by action."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import Costs, Plan, Report, find_faults, plan_for, simulate
from pipecut.schedule.action import CodedRow, code_of
from pipecut.schedule.big_record import BigRecord
from pipecut.schedule.registry import FAMILIES
from tests.support.properties import examples

NAMES = [name for name in FAMILIES if name != "DualPipeV"]  # whose overlaps have no codes
COSTS = Costs(1.3, 0.9, 0.7, 0.25, memory_forward=1.5, memory_backward_input=-0.5, memory_backward_weight=-1.0)


@contextmanager
def all_plans_big() -> Iterator[None]:
    with mock.patch("pipecut.schedule.plan._BIG", 0), mock.patch("pipecut.schedule.plan._MANY", 0):
        yield


def coded(plan: Plan) -> Plan:
    """The same plan, of codes, with nothing remembered."""
    rows = [CodedRow(code for code in map(code_of, row) if code is not None) for row in plan.actions]
    return plan.with_actions(rows)


def figures(report: Report) -> list[object]:
    lengths = [float(span.end) for span in report.critical_path]
    close = pytest.approx
    return [
        report.makespan,
        close(report.busy),
        close(report.bubble_rate),
        close(report.peak_memory),
        [close(tuple(idle), abs=1e-9) for idle in report.idle],
        [tuple(span) for span in report.timeline],
        lengths[-1],
    ]


def values(report: Report) -> list[object]:
    return [
        report.makespan,
        report.busy,
        report.bubble_rate,
        report.peak_memory,
        [tuple(idle) for idle in report.idle],
        [tuple(span) for span in report.timeline],
        report.critical_path[-1].end,
    ]


@settings(max_examples=examples(40))
@given(st.data())
def test_the_same_plan_the_same_proof_the_same_times(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    family = FAMILIES[name]
    chunks = data.draw(st.integers(1, 3)) if family.any_chunks else family.chunks
    plan = plan_for(name, ranks=data.draw(st.integers(1, 5)), microbatches=data.draw(st.integers(1, 9)), chunks=chunks)
    lowered = plan.lower()
    slow = [simulate(plan, COSTS), simulate(lowered, COSTS)]
    with all_plans_big():
        big = coded(plan)
        assert big.is_big
        made = big.lower()
        assert made.actions == lowered.actions
        assert made.is_proven or not made.has_transfers
        for report, expected in zip([simulate(big, COSTS), simulate(made, COSTS)], slow, strict=True):
            if report.plan.has_transfers or report.plan is big:
                assert isinstance(report.record, BigRecord)
            assert values(report) == figures(expected)


@settings(max_examples=examples(60))
@given(st.data())
def test_a_plan_that_is_wrong_is_never_proven(data: st.DataObject) -> None:
    """Actions are swapped, dropped, repeated or moved to another rank: the same faults as one by one."""
    name = data.draw(st.sampled_from(["1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble"]))
    plan = plan_for(name, ranks=data.draw(st.integers(2, 4)), microbatches=data.draw(st.integers(1, 5))).lower()
    random = Random(data.draw(st.integers(0, 10**6)))
    rows = [list(row) for row in plan.actions]
    for _ in range(data.draw(st.integers(1, 3))):
        row = random.choice([row for row in rows if row])
        slot, other = random.randrange(len(row)), random.randrange(len(row))
        change = random.randrange(4)
        if change == 0:
            row[slot], row[other] = row[other], row[slot]
        elif change == 1:
            del row[slot]
        elif change == 2:
            row.insert(other, row[slot])
        else:
            random.choice(rows).append(row.pop(slot))
    wrong = plan.with_actions(rows)
    faults = find_faults(wrong)
    with all_plans_big():
        big = coded(wrong)
        assert find_faults(big) == faults
        assert big.is_proven == (big.is_big and not faults)
        if faults:
            with pytest.raises(PlanError, match="cannot run|not complete"):
                simulate(big, COSTS)


@pytest.mark.parametrize("name", NAMES)
def test_lowered_plans_are_proven_at_once(name: str) -> None:
    """Messages of 1,024 ranks that go round through all of them took a minute: few can be done at a time."""
    plan = plan_for(name, ranks=3, microbatches=6)
    with all_plans_big(), mock.patch("pipecut.schedule.lockstep._meet_in_turn", side_effect=AssertionError):
        assert coded(plan.lower()).is_proven


def test_messages_in_an_order_of_their_own_are_met_in_turn() -> None:
    """The second activation goes first: no walk makes them so, but both ranks agree. If only one does, they block."""
    rows = {
        0: ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        1: ["1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
    }
    late = {**rows, 0: ["0F0", "0F1", "0SEND_F1", "0SEND_F0", *rows[0][4:]], 1: [*rows[1][1::-1], *rows[1][2:]]}
    circle = {**rows, 0: late[0]}
    with all_plans_big():
        for given, expected in ((rows, True), (late, True), (circle, False)):
            assert coded(Plan.from_actions(given)).is_proven == expected


def test_computations_that_wait_for_each_other() -> None:
    rows = {0: ["0F0", "0B0", "0F1", "0B1"], 1: ["1F0", "1F1", "1B0", "1B1"]}
    plan = Plan.from_actions(rows)
    with all_plans_big():
        big = coded(plan)
        for use in (lambda: big.lower(), lambda: simulate(big, COSTS)):
            with pytest.raises(PlanError, match="cannot run past"):
                use()


def test_a_big_plan_takes_this_way() -> None:
    plan = plan_for("Interleaved1F1B", ranks=32, microbatches=512)
    assert plan.is_big
    report = simulate(plan.lower().validate(), COSTS)
    assert isinstance(report.record, BigRecord)
    assert report.plan.is_proven
    assert "critical path" in str(report)
