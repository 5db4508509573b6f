"""Predicted and executed, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipecut.errors import PlanError
from pipecut.schedule import Costs, Dataflow, Plan, Timeline, compare, plan_for, simulate

REPORT = simulate(plan_for("ZB-H1", ranks=2, microbatches=3), Costs(forward=2, backward_input=3, backward_weight=1))


def slower(timeline: Timeline, factor: float) -> Timeline:
    spans = tuple(span._replace(start=10 + factor * span.start, end=10 + factor * span.end) for span in timeline)
    return replace(timeline, spans=spans, unit="s")


def test_a_run_that_takes_twice_as_long() -> None:
    comparison = compare(REPORT, slower(REPORT.timeline, 2.0))
    assert comparison.step.executed == pytest.approx(2 * REPORT.makespan)
    assert {line.what: line.ratio for line in comparison.kinds} == pytest.approx(
        {"forward": 2.0, "backward input": 2.0, "backward weight": 2.0}
    )
    assert [line.what for line in comparison.ranks] == ["rank 0", "rank 1"]
    assert "step" in str(comparison)
    assert "2.000" in str(comparison)


def test_traces_of_single_ranks() -> None:
    parts = [Timeline("part", 2, tuple(row), "s") for row in REPORT.timeline.by_rank]
    assert compare(REPORT, parts).step.ratio == 1.0
    only = compare(REPORT, parts[1])
    assert [line.what for line in only.ranks] == ["rank 1"]


@pytest.mark.parametrize("nothing", [Timeline("empty", 2, ()), [], None])
def test_nothing_was_traced(nothing: Any) -> None:
    with pytest.raises(PlanError, match=r"switch tracing on \(schedule.tracing = True\) before the step"):
        compare(REPORT, nothing)


def test_something_that_predicts_nothing() -> None:
    with pytest.raises(PlanError, match=r"takes the prediction of a step, and got a Plan: give the result of pipecut"):
        compare(REPORT.plan, REPORT.timeline)  # type: ignore[arg-type]


def test_a_run_of_another_plan() -> None:
    other = simulate(plan_for("1F1B", ranks=2, microbatches=3), Costs())
    with pytest.raises(PlanError, match="0B0 was executed and is not in the plan 'ZB-H1"):
        compare(REPORT, other.timeline)


def test_the_sum_of_a_tie_is_compared_without_the_wait_for_the_last_rank() -> None:
    flow = Dataflow.chain(2, ties=[{0, 1}])
    rows = {0: ["0F0", "0B0", "0REDUCE_TIES0"], 1: ["1F0", "1B0", "1REDUCE_TIES0"]}
    report = simulate(Plan.from_actions(rows, dataflow=flow), Costs(transfer=1, tie_bytes=[10]))
    spans = [
        span._replace(start=span.start - 2) if str(span.action) == "1REDUCE_TIES0" else span for span in report.timeline
    ]
    compared = compare(report, replace(report.timeline, spans=tuple(spans)))
    (line,) = [each for each in compared.kinds if "tie" in each.what]
    assert (line.what, line.predicted, line.executed) == ("reduce ties", 4.0, 4.0)
    # A timeline of the computations alone is that of a whole step too.
    computed = tuple(span for span in report.timeline if span.action.is_compute)
    kinds = compare(report, replace(report.timeline, spans=computed)).kinds
    assert [each.what for each in kinds] == ["forward", "full backward"]


def test_a_run_of_a_plan_with_fewer_microbatches() -> None:
    """Its actions are all in the plan, so that a part of the step was compared with the whole of it: ratio 0.556."""
    report = simulate(plan_for("1F1B", ranks=2, microbatches=8), Costs())
    shorter = simulate(plan_for("GPipe", ranks=2, microbatches=4), Costs())
    expected = (
        r"^Rank 0 did not execute 0F4, 0F5, 0B4, 0F6, \.\.\. of the plan '1F1B' \(8 of its 16 actions\): compare a "
        r"whole step of it, with all its microbatches and backwards\.$"
    )
    with pytest.raises(PlanError, match=expected):
        compare(report, shorter.timeline)


def test_a_run_without_backwards() -> None:
    forwards = [span for span in REPORT.timeline if span.action.op.name == "FORWARD"]
    with pytest.raises(
        PlanError, match=r"^Rank 0 did not execute 0I0, 0W0, 0I1, 0W1, \.\.\. of .* \(6 of its 9 actions"
    ):
        compare(REPORT, Timeline("evaluation", 2, tuple(forwards), "s"))


def test_a_run_in_another_order() -> None:
    """The same actions as those of GPipe, which has all forwards first."""
    report = simulate(plan_for("1F1B", ranks=2, microbatches=4), Costs())
    other = simulate(plan_for("GPipe", ranks=2, microbatches=4), Costs())
    with pytest.raises(
        PlanError, match=r"^Rank 0 executed 0F2 as number 2 where the plan '1F1B' has 0B0: compare a run"
    ):
        compare(report, other.timeline)


def test_what_was_executed_by_another_rank() -> None:
    swapped = Plan.from_actions({0: ["1F0", "1B0"], 1: ["0F0", "0B0"]})
    report = simulate(plan_for("1F1B", ranks=2, microbatches=1), Costs())
    with pytest.raises(
        PlanError, match="1F0 was executed and is not in the plan '1F1B' on rank 0: compare a run of it"
    ):
        compare(report, simulate(swapped, Costs()).timeline)
    third = [span._replace(rank=2) for span in report.timeline.by_rank[0]]
    with pytest.raises(PlanError, match="0F0 was executed and is not in the plan '1F1B' on rank 2"):
        compare(report, Timeline("third", 3, tuple(third), "s"))


def test_two_steps_at_once() -> None:
    with pytest.raises(PlanError, match="0F0 was executed 2 times on rank 0: compare one step at a time"):
        compare(REPORT, [REPORT.timeline, slower(REPORT.timeline, 2.0)])


def test_the_order_is_that_of_the_starts() -> None:
    """Timelines of several processes may be put together in any order."""
    backwards = replace(REPORT.timeline, spans=REPORT.timeline.spans[::-1])
    assert compare(REPORT, backwards).step.ratio == 1.0
