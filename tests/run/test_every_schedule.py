"""Every schedule, at 2 to 16 ranks, traced and cut by hand, gives the gradients of the uncut model, in one process."""

from __future__ import annotations

import pytest

from pipecut import PlannedSchedule, get_schedule_class
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.models import (
    by_hand_model,
    by_hand_problem,
    stages_by_hand,
    tangled_pipe,
    tangled_problem,
    traced_stages,
)
from tests.support.sampling import sampled
from tests.support.training import assert_evaluates_as_uncut, assert_trains_as_uncut

SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]


def microbatch_counts(name: str, ranks: int, stages: int) -> list[int]:
    """Below, equal to and above the number of stages; DualPipeV refuses less. The largest plans only above it."""
    counts = [ranks - 1, stages, stages + 1] if ranks < 16 else [stages + 1]
    return [count for count in counts if name != "DualPipeV" or count >= stages]


@pytest.mark.parametrize("ranks", sampled([2, 4, 8, 16], lambda ranks: ranks in (2, 4)))
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_a_traced_model(name: str, ranks: int) -> None:
    chunks = FAMILIES[name].chunks
    pipe = tangled_pipe(ranks * chunks)
    stages = traced_stages(pipe)
    for microbatches in microbatch_counts(name, ranks, len(stages)):
        plan = plan_for(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
        problem = tangled_problem(pipe.traced.model, samples=microbatches + 2)  # sizes 2, 2, 1, 1...
        schedule = PlannedSchedule(stages, plan, problem.loss_fn)
        assert_trains_as_uncut(schedule, problem)
        assert_evaluates_as_uncut(schedule, tangled_problem(pipe.traced.model, 2 * microbatches, seed=1))


@pytest.mark.parametrize("ranks", sampled([2, 4, 8, 16], lambda ranks: ranks in (2, 4)))
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_stages_cut_by_hand(name: str, ranks: int) -> None:
    chunks = FAMILIES[name].chunks
    model = by_hand_model(ranks * chunks)
    stages = stages_by_hand(model)
    for microbatches in microbatch_counts(name, ranks, len(stages)):
        problem = by_hand_problem(model, samples=microbatches + 2)
        schedule = get_schedule_class(name)(stages, microbatches, problem.loss_fn, ranks=ranks)  # type: ignore[arg-type]
        assert schedule.plan.ranks == ranks
        assert_trains_as_uncut(schedule, problem)
        assert_evaluates_as_uncut(schedule, by_hand_problem(model, 2 * microbatches, seed=1))


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_any_number_of_chunks(name: str, chunks: int) -> None:
    pipe = tangled_pipe(2 * chunks)
    problem = tangled_problem(pipe.traced.model, samples=9)
    schedule = get_schedule_class(name)(traced_stages(pipe), 4, problem.loss_fn, ranks=2)  # type: ignore[arg-type]
    assert_trains_as_uncut(schedule, problem)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if FAMILIES[name].chunks == 2])
def test_two_stages_on_a_single_rank(name: str) -> None:
    model = by_hand_model(2)
    problem = by_hand_problem(model, samples=5)
    schedule = get_schedule_class(name)(stages_by_hand(model), 3, problem.loss_fn, ranks=1)  # type: ignore[arg-type]
    assert_trains_as_uncut(schedule, problem)
