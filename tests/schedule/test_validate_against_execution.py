"""The validator accepts every plan that runs and refuses every plan that does not: checked by running it."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.errors import PlanError
from pipecut.schedule.plan import Plan
from pipecut.schedule.registry import plan_for, schedule_names
from pipecut.schedule.rules import Dataflow
from pipecut.schedule.validate import Fault, find_faults
from tests.schedule.blocking_channels import RAN, STUCK, execute
from tests.schedule.mutations import mutated, with_other_flags
from tests.schedule.plan_pictures import plan_of
from tests.schedule.random_plans import Shape, random_dataflow, random_plan
from tests.schedule.threaded_execution import execute_with_threads
from tests.support.properties import examples

EXAMPLES, THREADED_EXAMPLES = examples(170), examples(30)
RANDOM_SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    stages = draw(st.sampled_from([4, 3, 5, 6, 2, 1]))
    return Shape(
        stages=stages,
        ranks=min(stages, draw(st.sampled_from([3, 2, 4, 3, 2, 1]))),
        microbatches=draw(st.sampled_from([2, 3, 1])),
        training=draw(st.sampled_from([True, True, True, True, False])),
        transfers=draw(st.booleans()),
        upkeep=draw(st.booleans()),
        overlaps=draw(st.booleans()),
        straight=draw(st.booleans()),
    )


@st.composite
def schedules(draw: st.DrawFn) -> Plan:
    """Plans of known schedules, for a chain or for a model whose stages use each other's values in any other way."""
    name, ranks = draw(st.sampled_from(schedule_names())), draw(st.integers(1, 3))
    fewest = 2 * ranks if name == "DualPipeV" else 1
    plan = plan_for(name, ranks=ranks, microbatches=draw(st.integers(fewest, fewest + 3)))
    if draw(st.booleans()):
        plan = plan.with_dataflow(random_dataflow(Random(draw(RANDOM_SEEDS)), plan.stages))
    return plan


@st.composite
def valid_plans(draw: st.DrawFn) -> Plan:
    """Plans that run: as they were made, or lowered, or with their receives moved."""
    if draw(st.sampled_from([False, False, False, True])):
        plan, upkeep = draw(schedules()), False
    else:
        shape = draw(shapes())
        plan, upkeep = random_plan(Random(draw(RANDOM_SEEDS)), shape), shape.upkeep
    if draw(st.booleans()):
        max_held = None if upkeep else draw(st.sampled_from([None, 1, 2, 3]))
        plan = plan.lower(max_held=max_held, receives=draw(st.sampled_from(["as_sent", "early", "late"])))
    return plan


@st.composite
def any_plans(draw: st.DrawFn) -> Plan:
    """Plans that ran before up to three changes."""
    plan = draw(valid_plans())
    for _ in range(draw(st.sampled_from([1, 2, 3, 1, 0]))):
        plan = mutated(Random(draw(RANDOM_SEEDS)), plan)
    if draw(st.integers(0, 19)) == 19:
        plan = with_other_flags(Random(draw(RANDOM_SEEDS)), plan)
    return plan


def picture(plan: Plan, outcome: str, faults: list[Fault]) -> str:
    """All there is to know about a disagreement."""
    rows = "\n".join(f"  {list(row)}," for row in plan.actions)
    setting = f"{plan.placement}, {plan.dataflow}, microbatches={plan.microbatches}, training={plan.training}"
    return "\n".join([f"executed: {outcome}", "found:", *(f"  {fault}" for fault in faults), setting, rows])


def check_places(plan: Plan, faults: list[Fault]) -> None:
    """Every fault is at an action of the plan, or at the end of a row for an action that is not there."""
    for fault in faults:
        row = plan.actions[fault.rank]
        if fault.slot == len(row):
            assert "missing" in fault.problem, fault
            assert plan.placement.rank_of[fault.action.stage] == fault.rank, fault
        else:
            action = row[fault.slot]
            assert action is not None
            assert fault.action == action or fault.action in action.leaves, fault
    assert faults == sorted(faults, key=lambda fault: (not fault.cause, fault.rank, fault.slot))
    assert any(fault.cause for fault in faults) == bool(faults)
    assert len(set(faults)) == len(faults)


def check_message(plan: Plan, faults: list[Fault]) -> None:
    """All faults in one error, and the grid with the first of them in square brackets."""
    with pytest.raises(PlanError) as caught:
        plan.validate()
    assert caught.value.faults == tuple(faults)
    first, *lines = str(caught.value).splitlines()
    number = f"{len(faults)} fault" + "s" * (len(faults) > 1)
    assert first == f"The plan '{plan.name}' cannot run: {number}."
    assert lines[: min(len(faults), 20)] == [f"  {fault}" for fault in faults[:20]]
    place = faults[0]
    row = plan.actions[place.rank]
    marked = [line for line in lines if line.startswith(f"rank {place.rank} ")]
    assert len(marked) == 1
    if place.slot < len(row):
        assert f"[{row[place.slot]}]" in marked[0]


def check_other_readers(plan: Plan, faults: list[Fault]) -> None:
    """Drawing works for any plan; lowering gives a plan that runs, or an error, or the same faults again."""
    assert plan.grid().count("rank ") == plan.ranks
    try:
        lowered = plan.lower()
    except PlanError:
        assert faults
    else:
        assert bool(find_faults(lowered)) == bool(faults)


@pytest.mark.hypothesis
def test_the_verdict_is_what_execution_shows() -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(any_plans())
    def check(plan: Plan) -> None:
        outcome, faults = execute(plan), find_faults(plan)
        assert (outcome == RAN) == (not faults), picture(plan, outcome, faults)
        tally[STUCK if outcome.startswith(STUCK) else RAN if outcome == RAN else "failed"] += 1
        check_places(plan, faults)
        check_other_readers(plan, faults)
        if faults:
            check_message(plan, faults)
        else:
            assert plan.validate() is plan

    check()
    print(dict(tally))
    assert all(tally[kind] > EXAMPLES / 40 for kind in (RAN, STUCK, "failed")), tally


SMALL_PLANS = {
    "two ranks": plan_of("0F0 0SEND_F0 0RECV_B0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0"),
    "two ranks without transfers": plan_of("0F0 0F1 0B0 0B1 \n 1F0 1F1 1B0 1B1"),
    "two microbatches": plan_of("0F0 0F1 0SEND_F0 0SEND_F1 \n 1RECV_F0 1RECV_F1 1F0 1F1"),
    "three ranks with a skip": plan_of("0F0 0SEND_F0 0SEND_F0->2 \n 1RECV_F0 1F0 1SEND_F0 \n 2RECV_F0 2RECV_F0<-0 2F0"),
    "three ranks without transfers": plan_of("0F0 0B0 \n 1F0 1I0 1W0 \n 2F0 2B0 3F0 3B0"),
    "a tie that crosses": plan_of(
        "0F0 0B0 0REDUCE_TIES0 2F0 2B0 \n 1F0 1B0 1REDUCE_TIES0",
        dataflow=Dataflow(3, frozenset({(0, 1), (1, 2)}), frozenset({(1, 2)}), ties=(frozenset({0, 1}),)),
    ),
    "two ties": plan_of(
        "0F0 0B0 0REDUCE_TIES0 0REDUCE_TIES1 \n 1F0 1B0 1REDUCE_TIES0 1REDUCE_TIES1",
        dataflow=Dataflow.chain(2, ties=[(0, 1), (0, 1)]),
    ),
    "sharded": plan_of("0UNSHARD 0F0 0RESHARD 0B0 0UNSHARD 0REDUCE_GRAD"),
}


@pytest.mark.parametrize("name", SMALL_PLANS)
def test_every_order_of_a_small_plan(name: str) -> None:
    plan = SMALL_PLANS[name]
    orders = product(*(permutations(row) for row in plan.actions))
    verdicts: Counter[bool] = Counter()
    for rows in orders:
        changed = plan.with_actions(rows)
        outcome, faults = execute(changed), find_faults(changed)
        assert (outcome == RAN) == (not faults), picture(changed, outcome, faults)
        verdicts[outcome == RAN] += 1
    assert verdicts[False] > verdicts[True]
    assert verdicts[True] >= 1


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_runs(name: str) -> None:
    for ranks in range(1, 5):
        fewest = 2 * ranks if name == "DualPipeV" else 1
        for microbatches in range(fewest, fewest + 6):
            plan = plan_for(name, ranks=ranks, microbatches=microbatches)
            for form in (plan, plan.lower(max_held=1, receives="early"), plan.lower(receives="late")):
                assert execute(form) == RAN, f"{ranks} ranks, {microbatches} microbatches: {execute(form)}"
                assert find_faults(form) == []


@settings(max_examples=EXAMPLES // 3)
@given(valid_plans())
def test_plans_that_were_not_changed_are_valid(plan: Plan) -> None:
    assert execute(plan) == RAN, picture(plan, execute(plan), find_faults(plan))
    assert find_faults(plan) == []


@pytest.mark.hypothesis
def test_real_threads_agree_with_workers_that_take_turns() -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=THREADED_EXAMPLES)
    @given(any_plans())
    def check(plan: Plan) -> None:
        outcome, threaded = execute(plan), execute_with_threads(plan)
        assert (threaded == RAN) == (outcome == RAN), picture(plan, f"{outcome}; threads: {threaded}", [])
        tally[RAN if outcome == RAN else "did not"] += 1

    check()
    assert all(tally[kind] > THREADED_EXAMPLES / 10 for kind in (RAN, "did not")), tally
