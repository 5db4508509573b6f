"""Plans that users write: four by hand, from a CSV file, with transfers of their own, with any placement and order."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

import pipecut
from pipecut import PipelineScheduleSingle, PlanError, PlannedSchedule
from pipecut.schedule import FAMILIES, Action, Op, Placement, Plan, plan_for
from pipecut.schedule.registry import schedule as register
from tests.schedule.random_plans import Shape, random_plan
from tests.schedule.test_handwritten_plans import USER_MADE
from tests.support.models import (
    by_hand_model,
    by_hand_problem,
    chain_pipe,
    chain_problem,
    stages_by_hand,
    stages_of_chain,
    tangled_pipe,
    tangled_problem,
    traced_stages,
)
from tests.support.training import assert_evaluates_as_uncut, assert_trains_as_uncut


@pytest.mark.parametrize("name", USER_MADE)
def test_schedules_made_by_users(name: str) -> None:
    plan = Plan.from_actions(USER_MADE[name], name=name)
    model = by_hand_model(plan.stages)
    problem = by_hand_problem(model, samples=5)
    schedule = PlannedSchedule(stages_by_hand(model), plan, problem.loss_fn)
    assert_trains_as_uncut(schedule, problem)
    assert_evaluates_as_uncut(schedule, by_hand_problem(model, samples=4, seed=1))


@pytest.mark.parametrize("name", [name for name in USER_MADE if name != "WithReorderedB"])
def test_schedules_made_by_users_run_a_tangled_model(name: str) -> None:
    plan = Plan.from_actions(USER_MADE[name], name=name)
    pipe = tangled_pipe(plan.stages)
    problem = tangled_problem(pipe.traced.model, samples=5)
    assert_trains_as_uncut(PlannedSchedule(traced_stages(pipe), plan, problem.loss_fn), problem)


def test_a_plan_with_transfers_runs_a_traced_chain() -> None:
    problem = chain_problem(2, samples=5)
    schedule = PlannedSchedule(
        traced_stages(chain_pipe(problem)), Plan.from_actions(USER_MADE["WithReorderedB"]), problem.loss_fn
    )
    assert_trains_as_uncut(schedule, problem)
    assert_evaluates_as_uncut(schedule, problem)


def test_a_plan_with_transfers_that_lacks_those_of_a_skip_is_refused() -> None:
    plan = plan_for("1F1B", ranks=4, microbatches=2).lower()
    pipe = tangled_pipe(4)
    problem = tangled_problem(pipe.traced.model, samples=5)
    with pytest.raises(PlanError, match="0SEND_F0->3: is missing"):
        PlannedSchedule(traced_stages(pipe), plan, problem.loss_fn).step(
            *problem.args, target=problem.target, **problem.kwargs
        )


def test_a_registered_family_has_a_class() -> None:
    before = dict(FAMILIES)

    @register("One-by-one")
    def one_by_one(placement: Placement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Run one microbatch after the other."""
        ops = (Op.FORWARD, Op.FULL_BACKWARD)
        row = [(op, microbatch) for microbatch in range(microbatches) for op in ops]
        return tuple(tuple(Action(rank, op, number) for op, number in row) for rank in range(placement.ranks))

    try:
        kind = pipecut.get_schedule_class("one-by-one")
        assert kind is pipecut.get_schedule_class("ScheduleOnebyone")
        assert issubclass(kind, PipelineScheduleSingle)
        assert (kind.__name__, kind.__doc__) == ("ScheduleOnebyone", "Run one microbatch after the other.")
        problem = chain_problem(2, samples=5)
        assert_trains_as_uncut(kind(stages_of_chain(problem.model), 2, problem.loss_fn), problem)
    finally:
        FAMILIES.clear()
        FAMILIES.update(before)


@pytest.mark.parametrize("lowered", [False, True])
def test_a_plan_from_a_csv_file(lowered: bool, tmp_path: Path) -> None:
    plan = plan_for("InterleavedZeroBubble", ranks=2, chunks=2, microbatches=3)
    (plan.lower() if lowered else plan).save_csv(tmp_path / "plan.csv")
    problem = chain_problem(4, samples=7)
    schedule = PlannedSchedule(stages_of_chain(problem.model), Plan.load_csv(tmp_path / "plan.csv"), problem.loss_fn)
    assert_trains_as_uncut(schedule, problem)
    assert_evaluates_as_uncut(schedule, problem)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("transfers", [False, True])
def test_any_placement_and_any_order_of_a_chain(seed: int, transfers: bool) -> None:
    random = Random(seed)
    shape = Shape(
        stages=random.randint(2, 6),
        ranks=random.randint(1, 2),
        microbatches=random.randint(1, 5),
        transfers=transfers,
        overlaps=not transfers,
        straight=True,
    )
    plan = random_plan(random, shape)
    model = by_hand_model(plan.stages)
    problem = by_hand_problem(model, samples=plan.microbatches + 1)
    schedule = PlannedSchedule(stages_by_hand(model), plan, problem.loss_fn)
    assert_trains_as_uncut(schedule, problem)
    assert_evaluates_as_uncut(schedule, problem)


@pytest.mark.parametrize("seed", range(12))
def test_any_placement_and_any_order_of_a_tangled_model(seed: int) -> None:
    random = Random(seed)
    shape = Shape(
        stages=random.choice([3, 4, 6]),
        ranks=random.randint(1, 3),
        microbatches=random.randint(1, 4),
        overlaps=True,
        straight=True,
    )
    plan = random_plan(random, shape)
    pipe = tangled_pipe(plan.stages)
    problem = tangled_problem(pipe.traced.model, samples=plan.microbatches + 1)
    assert_trains_as_uncut(PlannedSchedule(traced_stages(pipe), plan, problem.loss_fn), problem, times=2)
