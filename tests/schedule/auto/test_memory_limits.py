"""Limits are kept whatever the costs, and the least one that is named is the least."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule import Costs, FoundPlan, auto_schedule, plan_for, search_schedule, simulate
from tests.schedule.auto.random_costs import MEASURES, amounts, changes, fixed_plans, random_changes, random_costs
from tests.support.properties import examples

GROWING = Costs(memory_forward=1, memory_backward_input=0.5, memory_backward_weight=-1.5)


def searched(ranks: int, microbatches: int, costs: Costs, limit: float | list[float], **options: str) -> FoundPlan:
    return search_schedule(
        ranks=ranks, microbatches=microbatches, costs=costs, memory_limit=limit, time_budget=0.02, **options
    )  # type: ignore[arg-type]


def least_of(error: PlanError) -> float:
    (text,) = re.findall(r"the least memory_limit that would do is ([\d.e+-]+)\. ", str(error))
    return float(text)


def test_weights_that_are_moved_keep_to_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """1F1B fits in 2. Its backwards were cut in halves, between which a rank holds more, and 2.5 was printed."""
    plan = auto_schedule(
        ranks=2, microbatches=4, costs=GROWING, memory_limit=2, placement="loop", chunks=1, time_budget=0.05
    )
    assert max(simulate(plan, GROWING).peak_memory) == 2
    assert capsys.readouterr().out.endswith("peak memory 2\n")


@settings(max_examples=examples(15))
@given(st.data())
def test_what_a_fixed_schedule_holds_is_enough(data: st.DataObject) -> None:
    """Its own peaks are the limits, of which some may be lifted: what is found fits, and takes no more time."""
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    chunks = data.draw(st.sampled_from([1, 2]))
    costs = data.draw(st.one_of(random_costs(ranks * chunks), random_changes(ranks * chunks)))
    objective = data.draw(st.sampled_from(sorted(MEASURES)))
    report = simulate(data.draw(st.sampled_from(fixed_plans(ranks, microbatches, chunks))), costs)
    limits = [data.draw(st.sampled_from([peak, peak, math.inf])) for peak in report.peak_memory]
    found = searched(ranks, microbatches, costs, limits, objective=objective)
    peaks = simulate(found.plan, costs).peak_memory
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True))
    assert found.time <= MEASURES[objective](report) * (1 + 1e-9)
    found.plan.lower().validate()


def test_full_backwards_fit_where_their_halves_do_not() -> None:
    """1F1B holds 1. Only halves were thought of, and 1.25 was said to be the least."""
    assert simulate(plan_for("1F1B", ranks=1, microbatches=2), GROWING).peak_memory == (1.0,)
    assert max(searched(1, 2, GROWING, 1).report.peak_memory) == 1
    with pytest.raises(PlanError) as error:
        searched(1, 2, GROWING, 0.99)
    assert least_of(error.value) == 1


@settings(max_examples=examples(10))
@given(st.data())
def test_the_least_limit_will_do_and_less_will_not(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    chunks = data.draw(st.sampled_from([1, 2]))
    costs = data.draw(st.one_of(random_costs(ranks * chunks), random_changes(ranks * chunks)))
    peaks = [max(simulate(plan, costs).peak_memory) for plan in fixed_plans(ranks, microbatches, chunks)]
    assume(min(peaks) > 0.01)
    with pytest.raises(PlanError, match="No plan fits the memory limit") as error:
        searched(ranks, microbatches, costs, 0)
    least = least_of(error.value)
    assert least <= min(peaks) * (1 + 1e-5)  # six digits
    assert max(searched(ranks, microbatches, costs, least).report.peak_memory) <= least * (1 + 1e-9)
    with pytest.raises(PlanError, match="No plan fits the memory limit"):
        searched(ranks, microbatches, costs, least * (1 - 2e-5))


def least_peak(microbatches: int, held: list[float], inputs: list[float], weights: list[float]) -> float:
    """The least that one rank with all stages can hold, over all orders of its passes: every state is looked at."""
    last = len(held) - 1
    chain = [("F", stage) for stage in range(last + 1)] + [("I", stage) for stage in range(last, -1, -1)]
    State = tuple[tuple[int, frozenset[int]], ...]  # of each microbatch: how far it is, which weights wait
    start: State = ((0, frozenset()),) * microbatches
    best: dict[State, float] = {start: 0.0}
    level = {start: 0.0}  # what is held there: it follows from the state
    todo = [start]
    while todo:
        state = todo.pop()
        for one, (at, waiting) in enumerate(state):
            steps: list[tuple[tuple[int, frozenset[int]], float]] = []
            steps += [((at, waiting - {stage}), weights[stage]) for stage in waiting]
            if at < len(chain):
                kind, stage = chain[at]
                if kind == "F":
                    steps.append(((at + 1, waiting), held[stage]))
                else:
                    steps.append(((at + 1, waiting | {stage}), inputs[stage]))
                    steps.append(((at + 1, waiting), inputs[stage] + weights[stage]))
            for changed, growth in steps:
                after: State = tuple(sorted((*state[:one], changed, *state[one + 1 :]), key=str))
                level[after] = level[state] + growth
                peak = max(best[state], level[after])
                if peak < best.get(after, math.inf) - 1e-12:
                    best[after] = peak
                    todo.append(after)
    return best[((len(chain), frozenset()),) * microbatches]


@settings(max_examples=examples(10))
@given(st.data())
def test_no_order_at_all_needs_less_than_the_least(data: st.DataObject) -> None:
    """Where no forward frees memory and no full backward takes any."""
    stages = data.draw(st.sampled_from([1, 2]))
    microbatches = data.draw(st.integers(1, 3))
    column = st.lists(amounts, min_size=stages, max_size=stages)
    held, freed = data.draw(column), data.draw(column)
    inputs = data.draw(st.lists(changes, min_size=stages, max_size=stages))
    weights = [-one - other for one, other in zip(inputs, freed, strict=True)]
    least = least_peak(microbatches, held, inputs, weights)
    assume(least > 0.01)
    costs = Costs(memory_forward=held, memory_backward_input=inputs, memory_backward_weight=weights)
    with pytest.raises(PlanError) as error:
        searched(1, microbatches, costs, 0)
    assert least_of(error.value) == pytest.approx(least, rel=1e-5)


def test_a_least_limit_with_many_digits_is_rounded_up() -> None:
    costs = Costs(memory_forward=8589934592.0, memory_backward_weight=-8589934592.0)
    with pytest.raises(PlanError) as error:
        search_schedule(ranks=2, microbatches=2, costs=costs, memory_limit=1e9, chunks=1, time_budget=0.02)
    least = least_of(error.value)
    assert least == 8.58994e09
    search_schedule(ranks=2, microbatches=2, costs=costs, memory_limit=least, chunks=1, time_budget=0.02)


@pytest.mark.parametrize("limit", [math.inf, [3, math.inf], [math.inf, math.inf]])
def test_a_rank_without_limit(limit: float | list[float]) -> None:
    """[3, inf] was refused as not finite: there was no way to leave one rank alone."""
    found = search_schedule(ranks=2, microbatches=4, memory_limit=limit, placement="loop", chunks=1, time_budget=0.05)
    assert found.gap == 0
    assert found.report.peak_memory[0] <= 3


def test_the_least_limits_beside_a_rank_without() -> None:
    expected = r"rank 0 may hold 0.5, and one .* needs 1 there; the least limits that would do are \[1.0, inf\]"
    with pytest.raises(PlanError, match=expected):
        search_schedule(ranks=2, microbatches=4, memory_limit=[0.5, math.inf], chunks=1, placement="loop")


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ([1, math.nan], r"memory_limit\[1\]=nan is not finite: give a finite number, or inf for no limit"),
        (-math.inf, r"memory_limit=-inf is negative: give 0 or more"),
        ([-(10**400), 1], r"memory_limit\[0\]=-10+ is negative: give 0 or more"),
    ],
)
def test_what_is_no_limit(limit: float | list[float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        search_schedule(ranks=2, microbatches=4, memory_limit=limit, time_budget=0.05)
