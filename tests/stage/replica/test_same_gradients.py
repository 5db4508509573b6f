"""Two pipelines with half of the batch each give the gradients of one process with all of it."""

from __future__ import annotations

import pytest

from tests.stage.replica.pipeline_grid import Grid, Wrap, plan_of
from tests.stage.replica.wrappers import copied, replicated, sharded, sharded_as_one
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed


SCHEDULES = ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
LARGE = 400  # wide enough that the split backward puts weight gradients off


def train(number: int, schedule: str, wrap: Wrap, width: int) -> None:
    """Two accumulated steps with an evaluation between them, an optimizer's step, an evaluation, a step."""
    grid = Grid(number, schedule, wrap, width=width)
    grid.step(0)
    grid.check_gradients()
    grid.check_eval(1)
    grid.step(1)
    grid.check_gradients()
    grid.optimize()
    grid.check_eval(2)
    grid.step(2)
    grid.check_gradients()


@pytest.mark.parametrize("wrap", [copied, sharded])
@pytest.mark.parametrize(
    "schedule", sampled(SCHEDULES, lambda name: name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"))
)
def test_every_schedule(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    ranks.run(train, schedule, wrap, 8)


@pytest.mark.parametrize(
    "schedule",
    sampled(["1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"], lambda name: name in ("1F1B", "ZB-H1")),
)
def test_replicate(ranks: Ranks, schedule: str) -> None:
    ranks.run(train, schedule, replicated, LARGE if schedule == "ZB-H1" else 8)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_stages_sharded_as_one(ranks: Ranks, schedule: str) -> None:
    ranks.run(train, schedule, sharded_as_one, 8)


@pytest.mark.parametrize("wrap", [copied, sharded])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "ZBVZeroBubble"])
def test_weight_gradients_that_are_put_off(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    ranks.run(train, schedule, wrap, LARGE)


def train_by_bare_plan(number: int, schedule: str, wrap: Wrap) -> None:
    grid = Grid(number, plan_of(schedule).lower(), wrap)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()
        grid.check_eval(seed)


@pytest.mark.parametrize("wrap", [copied, sharded])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_plan_that_says_nothing_of_sharding(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    """Then parameters are gathered when they are needed, and gradients reduced after the last backward."""
    ranks.run(train_by_bare_plan, schedule, wrap)
