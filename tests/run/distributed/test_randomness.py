"""Dropout on real ranks: what one process draws, what the uncut model draws, and generators that stay in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecut import PipeError, PlannedSchedule
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import Plan, plan_for
from tests.run.random_models import by_microbatches, noisy_loss, noisy_model, noisy_problem, noisy_stages
from tests.support.nested_values import assert_same
from tests.support.ranks import Ranks
from tests.support.training import TIGHT, Gradients, Problem, assert_same_gradients, cut_step, gradients_of

pytestmark = pytest.mark.distributed

MICROBATCHES, SAMPLES, SIZES = 5, 8, (2, 2, 2, 1, 1)
both_kinds = pytest.mark.parametrize("traced", [True, False], ids=["traced", "by hand"])
every_schedule = pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])


def steps_on(
    rank: int, schedule: PipelineSchedule, problem: Problem, seed: int, times: int = 2
) -> tuple[Any, Gradients]:
    """Steps with what this rank has, and what they give here."""
    placement = schedule.plan.placement
    problem.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    for _ in range(times):
        args = problem.args if rank == placement.rank_of[0] else ()
        output = schedule.step(*args, target=problem.target if rank == placement.rank_of[-1] else None)
    return output, gradients_of(problem.model)


def assert_same_where_held(schedule: PipelineSchedule, problem: Problem, mine: Gradients, expected: Gradients) -> None:
    held = {id(parameter) for stage in schedule.stages for parameter in stage.submod.parameters()}
    names = [name for name, parameter in problem.model.named_parameters() if id(parameter) in held]
    assert names
    assert_same_gradients({name: mine[name] for name in names}, {name: expected[name] for name in names}, TIGHT)


def on_one_rank(stages: int, traced: bool) -> PipelineSchedule:
    """All stages in this process, one after the other."""
    forwards = [f"{stage}F{microbatch}" for stage in range(stages) for microbatch in range(MICROBATCHES)]
    backwards = [f"{stage}B{microbatch}" for stage in reversed(range(stages)) for microbatch in range(MICROBATCHES)]
    plan = Plan.from_actions({0: forwards + backwards})
    return PlannedSchedule(noisy_stages(plan, traced), plan, noisy_loss, random_numbers="per_stage")


def check_random_numbers(rank: int, name: str, traced: bool, kind: str) -> bytes:
    """Against the uncut model or one process, on this very rank; and where the default generator is afterwards."""
    plan = plan_for(name, ranks=2, microbatches=MICROBATCHES)
    problem = noisy_problem(noisy_model(plan.stages, traced), SAMPLES)
    schedule = PlannedSchedule(noisy_stages(plan, traced, rank), plan, noisy_loss, random_numbers=kind)
    output, gradients = steps_on(rank, schedule, problem, seed=5)
    state = torch.get_rng_state()
    # The seed of the first rank counts, and it counts for all.
    again = steps_on(rank, schedule, problem, seed=5 + rank)
    assert_same_gradients(again[1], gradients, 0.0)
    torch.manual_seed(5)
    if kind == "as_uncut":
        expected = by_microbatches(problem, SIZES, times=2)
    else:
        expected = cut_step(on_one_rank(plan.stages, traced), problem, times=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_where_held(schedule, problem, gradients, expected.gradients)
    if output is not None:
        assert_same(output, expected.output, "output", TIGHT)
    return bytes(state.numpy())


@both_kinds
@every_schedule
@pytest.mark.parametrize("kind", ["per_stage", "as_uncut"])
def test_two_ranks_draw_what_one_process_draws(two_ranks: Ranks, name: str, traced: bool, kind: str) -> None:
    states = two_ranks.run(check_random_numbers, name, traced, kind)
    assert states[0] == states[1]  # of the default generators: what ranks draw themselves stays the same on all of them


def check_disagreement(rank: int) -> str:
    plan = plan_for("1F1B", ranks=2, microbatches=MICROBATCHES)
    kind = "as_uncut" if rank else "per_stage"
    with pytest.raises(PipeError) as caught:
        PlannedSchedule(noisy_stages(plan, False, rank), plan, noisy_loss, random_numbers=kind).step()
    return str(caught.value)


def test_ranks_agree_on_the_kind_of_random_numbers(two_ranks: Ranks) -> None:
    for message in two_ranks.run(check_disagreement):
        assert "random_numbers: per_stage on rank 0; as_uncut on rank 1" in message, message
