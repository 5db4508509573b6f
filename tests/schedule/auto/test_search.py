"""Searched plans: never worse than the fixed ones, within limits, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import (
    Costs,
    Link,
    Placement,
    auto_schedule,
    search_schedule,
    simulate,
)
from pipecut.schedule.auto.problem import problem_for
from pipecut.schedule.auto.timing import lower_bound
from tests.schedule.auto.random_costs import MEASURES, fixed_plans, random_costs
from tests.support.properties import examples


@pytest.mark.parametrize("objective", sorted(MEASURES))
@pytest.mark.parametrize("limit", [36.2, 43.42])
def test_the_time_is_that_of_the_plan(objective: str, limit: float) -> None:
    """Refitting reported when a rank had stopped waiting, which is later than the order that it made needs."""
    costs = Costs(
        forward=(3.48, 4.12, 1.62, 7.3),
        backward_input=(0.0, 6.01, 9.37, 1.0),
        backward_weight=(2.76, 0.0, 7.56, 0.0),
        transfer=4.4,
        memory_forward=(7.24, 5.18, 7.22, 6.17),
        memory_backward_input=(-2.9, -2.07, -2.89, -2.47),
        memory_backward_weight=(-4.34, -3.11, -4.33, -3.7),
    )
    options = {"ranks": 2, "microbatches": 7, "costs": costs, "memory_limit": limit, "placement": "any"}
    for seed in range(4):
        found = search_schedule(**options, objective=objective, time_budget=0.02, seed=seed)  # type: ignore[arg-type]
        assert MEASURES[objective](found.report) == pytest.approx(found.time, rel=1e-9)


@settings(max_examples=examples(10))
@given(st.data())
def test_never_worse_than_a_fixed_schedule_that_fits(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    chunks = data.draw(st.sampled_from([1, 2]))
    costs = data.draw(random_costs(ranks * chunks))
    objective = data.draw(st.sampled_from(sorted(MEASURES)))
    reports = [simulate(plan, costs) for plan in fixed_plans(ranks, microbatches, chunks)]
    peaks = sorted(max(report.peak_memory) for report in reports)
    limit = data.draw(st.sampled_from(peaks))
    found = search_schedule(
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        memory_limit=limit,
        placement="any",
        objective=objective,
        time_budget=0.02,
    )
    measure = MEASURES[objective]
    close = 1e-9 * (1 + found.time)
    assert measure(found.report) == pytest.approx(found.time, rel=1e-9, abs=1e-9)
    assert max(found.report.peak_memory) <= limit * (1 + 1e-9)
    assert found.lower_bound <= found.time + close
    for report in reports:
        if max(report.peak_memory) <= limit:
            assert found.time <= measure(report) + close, report.plan.name
        problem = problem_for(report.plan.placement, microbatches, costs, report.peak_memory)
        assert lower_bound(problem, objective) <= measure(report) + close, report.plan.name
    found.plan.lower().validate()


@pytest.mark.parametrize(
    ("times", "kept", "most"),
    [(1, 0.43, 0.0001), (2, 0.43, 0.0007), (2, 0.9, 0.004), (3, 0.43, 0.0001)],
    ids=["memory of 1F1B", "twice", "twice, and little is freed before the weight gradients", "three times"],
)
def test_thirty_two_ranks_are_near_the_bound(times: float, kept: float, most: float) -> None:
    """With twice the memory of 1F1B the gap was 0.67%: half of it the bound's, half of it the plan's."""
    costs = Costs(10.4, 10.2, 7.7, 0.4, memory_backward_input=kept - 1, memory_backward_weight=-kept)
    found = search_schedule(
        ranks=32, microbatches=96, costs=costs, memory_limit=32 * times, placement="loop", chunks=1, time_budget=0.5
    )
    assert found.gap <= most


def test_the_bound_knows_that_memory_makes_ranks_wait() -> None:
    """Two ranks that may hold one microbatch: rank 0 waits for both passes of rank 1, again and again.

    Three units for each, before the first gradient and after the last forward: what lies between is not counted.
    """
    problem = problem_for(Placement.loop(2), 3, Costs(1, 2, 1), [1, 1])
    assert problem.work == (12, 12)
    assert lower_bound(problem, "span") == 12 + 3 + 3


@pytest.mark.parametrize("limit", [1.0, 1.5])
def test_the_bound_counts_the_last_weight_gradient_once(limit: float) -> None:
    """An input gradient that takes memory does not fit alone: the weight gradient of the one whole backward was counted
    as work before its end, and once more after it.
    """
    costs = Costs(0, 0, 1, memory_forward=1, memory_backward_input=0.5, memory_backward_weight=-1.5)
    for objective in MEASURES:
        assert lower_bound(problem_for(Placement.loop(1), 1, costs, [limit]), objective) == 1


def test_the_time_is_printed_with_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    plan = auto_schedule(ranks=2, microbatches=3, time_budget=0.05)
    line = capsys.readouterr().out
    assert line.startswith(f"{plan.name}: span 9, lower bound 9, gap 0.00%")
    auto_schedule(ranks=2, microbatches=3, time_budget=0.05, verbose=False)
    assert capsys.readouterr().out == ""


def test_the_same_arguments_give_the_same_plan() -> None:
    costs = Costs(forward=[3, 2, 4], backward_input=[3, 3, 3], backward_weight=[1, 2, 2], transfer=0.5)
    plans = {
        search_schedule(ranks=3, microbatches=6, costs=costs, memory_limit=4, time_budget=1.0, seed=3).plan.actions
        for _ in range(2)
    }
    assert len(plans) == 1


def test_the_table_tells_why_others_lost() -> None:
    found = search_schedule(ranks=4, microbatches=8, memory_limit=4, time_budget=0.1)
    reasons = {(row.name, row.placement): row.why for row in found.tried}
    assert re.fullmatch(r"rank \d would hold 8, its limit is 4", reasons["GPipe", "loop x 1"])
    assert re.fullmatch(r"[\d.]+% slower", reasons["1F1B", "loop x 1"])
    assert [row.why for row in found.tried].count("taken") == 1
    assert found.table().splitlines()[1].endswith("taken")


def test_weights_are_not_moved_where_that_cannot_win_or_comes_again() -> None:
    """With 32 ranks and 256 microbatches they took most of the time; 1F1B and ZB-H1 differ in weight gradients only."""
    costs = Costs(1, 0.85, 0.61, 0.03, memory_backward_input=-0.6, memory_backward_weight=-0.4)
    found = search_schedule(
        ranks=4, microbatches=8, costs=costs, memory_limit=4, placement="loop", chunks=1, time_budget=0.1
    )
    moved = [row.name for row in found.tried if row.name.endswith("weights moved") and "greedy" not in row.name]
    assert len(moved) == 1
    assert "one microbatch at a time, weights moved" not in moved


def test_every_rank_can_have_its_own_limit() -> None:
    found = search_schedule(ranks=4, microbatches=8, memory_limit=[4, 1, 2, 1], placement="loop", time_budget=0.1)
    assert all(peak <= limit for peak, limit in zip(found.report.peak_memory, [4, 1, 2, 1], strict=True))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("placement", ["loop", "v"])
def test_the_least_limit_that_is_named_will_do(placement: str, chunks: int) -> None:
    sizes: dict[str, Any] = {"ranks": 3, "microbatches": 5, "placement": placement, "chunks": chunks}
    held = [1.0 + stage for stage in range(3 * chunks)]
    costs = Costs(memory_forward=held, memory_backward_weight=[-each for each in held])
    with pytest.raises(PlanError, match=r"the least memory_limit that would do is (\d+)") as error:
        search_schedule(costs=costs, memory_limit=0.5, time_budget=0.05, **sizes)
    least = float(re.findall(r"would do is ([\d.]+)\. ", str(error.value))[0])
    found = search_schedule(costs=costs, memory_limit=least, time_budget=0.05, **sizes)
    assert max(found.report.peak_memory) == least
    with pytest.raises(PlanError, match="No plan fits the memory limit"):
        search_schedule(costs=costs, memory_limit=least - 0.5, time_budget=0.05, **sizes)


def test_a_limit_that_nothing_satisfies_names_the_rank() -> None:
    with pytest.raises(PlanError) as error:
        auto_schedule(ranks=2, microbatches=4, memory_limit=[2, 0.25], chunks=1, placement="loop")
    assert str(error.value) == (
        "No plan fits the memory limit: rank 1 may hold 0.25, and one microbatch at a time needs 1 there; the least "
        "limits that would do are [1.0, 1.0]. Raise it, or make the microbatches smaller."
    )


def test_memory_that_is_never_freed_adds_up() -> None:
    costs = Costs(memory_backward_weight=-0.5)
    with pytest.raises(PlanError, match="would do is 3"):
        search_schedule(ranks=2, microbatches=5, costs=costs, memory_limit=2.9, placement="loop", time_budget=0.05)
    found = search_schedule(ranks=2, microbatches=5, costs=costs, memory_limit=3, placement="loop", time_budget=0.05)
    assert max(found.report.peak_memory) <= 3


def test_costs_for_each_stage_tell_the_chunks() -> None:
    found = search_schedule(ranks=2, microbatches=3, costs=Costs(forward=[1, 2, 3, 4]), time_budget=0.05)
    assert found.plan.stages == 4


def test_an_arrangement_without_transfer_times_is_left_out_and_told() -> None:
    costs = Costs(transfer={(0, 1): 1.0, (1, 0): 1.0, (1, 2): 1.0, (2, 1): 1.0})
    found = search_schedule(ranks=3, microbatches=4, costs=costs, placement="loop", time_budget=0.05)
    (left_out,) = (row for row in found.tried if row.placement == "loop x 2")
    assert "no value for messages from rank 2 to rank 0" in left_out.why


def test_the_number_of_microbatches_is_chosen() -> None:
    """Costs are those of one of the first number of microbatches: more of them are smaller, and fill the pipeline."""
    alone = search_schedule(ranks=4, microbatches=4, placement="loop", chunks=1, time_budget=0.1)
    found = search_schedule(ranks=4, microbatches=[4, 16], placement="loop", chunks=1, time_budget=0.1)
    assert (found.plan.microbatches, found.report.costs.forward) == (16, 0.25)
    assert found.time < alone.time
    slow = Costs(transfer=Link(latency=50, bandwidth=1e9), message_bytes=8.0)
    found = search_schedule(ranks=4, microbatches=[4, 16], costs=slow, objective="makespan", time_budget=0.1)
    assert all(row.time is None or row.time >= 300 for row in found.tried)  # latency does not shrink


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 0}, r"ranks=0: give an integer number of ranks, 1 or more"),
        ({"microbatches": 0}, r"microbatches=0: give an integer number"),
        ({"microbatches": []}, r"microbatches is an empty list"),
        ({"placement": "ring"}, r"placement='ring': give one of 'loop', 'v', 'any'"),
        ({"objective": "bubble"}, r"objective='bubble': give one of 'span', 'makespan'"),
        ({"chunks": 0}, r"chunks=0: give an integer number of chunks"),
        ({"costs": 3}, r"costs=3: give Costs"),
        ({"memory_limit": -1}, r"memory_limit=-1 is negative"),
        ({"memory_limit": float("nan")}, r"memory_limit=nan is not finite"),
        ({"memory_limit": [1, 2, 3]}, r"memory_limit has 3 numbers for 2 ranks: give one for each, or one"),
        ({"memory_limit": "24GB"}, r"memory_limit='24GB' is not a number"),
        ({"time_budget": -1.0}, r"time_budget=-1.0 is negative"),
        ({"costs": Costs(forward=[1, 2, 3])}, r"forward has 3 values, for as many stages, which 2 ranks cannot share"),
        ({"costs": Costs(forward=[1, 2]), "chunks": 2}, r"forward has no value for stage 2"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        search_schedule(**{"ranks": 2, "microbatches": 4, "time_budget": 0.05, **wrong})


def test_costs_that_are_no_times_are_refused() -> None:
    with pytest.raises(PlanError, match="forward=nan is not finite"):
        auto_schedule(ranks=2, microbatches=4, costs=Costs(forward=float("nan")))
    with pytest.raises(PlanError, match=r"backward_weight=-1 is negative"):
        auto_schedule(ranks=2, microbatches=4, costs=Costs(backward_weight=-1))


def test_no_time_at_all() -> None:
    """Neither for the search nor for the passes."""
    found = search_schedule(ranks=2, microbatches=2, costs=Costs(0, 0, 0), time_budget=0)
    assert (found.time, found.gap) == (0.0, 0.0)
