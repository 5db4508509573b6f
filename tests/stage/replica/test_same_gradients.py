"""Two pipelines with half of the batch each give the gradients of one process with all of it."""

from __future__ import annotations

from typing import Any

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
    loss = grid.step(0)
    assert grid.schedule.mean_loss() == pytest.approx(loss, rel=1e-12)  # of the whole batch, on every rank
    grid.check_gradients()
    grid.check_eval(1)
    grid.step(1)
    grid.check_gradients()
    grid.optimize()
    grid.check_eval(2)
    grid.step(2)
    grid.check_gradients()


@pytest.mark.parametrize("wrap", [copied, sharded])
@pytest.mark.parametrize("schedule", sampled(SCHEDULES, lambda name: name == "ZBVZeroBubble"))
def test_every_schedule(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    ranks.run(train, schedule, wrap, 8)


@pytest.mark.parametrize(
    "schedule",
    sampled(["1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"], lambda name: name in ("1F1B", "ZB-H1")),
)
def test_replicate(ranks: Ranks, schedule: str) -> None:
    ranks.run(train, schedule, replicated, LARGE if schedule == "ZB-H1" else 8)


@pytest.mark.parametrize("schedule", sampled(["1F1B", "ZBVZeroBubble"], lambda name: name == "1F1B"))
def test_stages_sharded_as_one(ranks: Ranks, schedule: str) -> None:
    ranks.run(train, schedule, sharded_as_one, 8)


@pytest.mark.parametrize("wrap", sampled([copied, sharded], lambda wrap: wrap is sharded))
@pytest.mark.parametrize("schedule", sampled(["1F1B", "ZB-H1", "ZBVZeroBubble"], lambda name: name == "ZB-H1"))
def test_weight_gradients_that_are_put_off(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    ranks.run(train, schedule, wrap, LARGE)


def train_by_bare_plan(number: int, schedule: str, wrap: Wrap) -> None:
    grid = Grid(number, plan_of(schedule).lower(), wrap)
    for seed in range(2):
        grid.step(seed)
        grid.check_gradients()
        grid.check_eval(seed)


@pytest.mark.parametrize("wrap", [copied, sharded])
@pytest.mark.parametrize("schedule", sampled(["1F1B", "ZBVZeroBubble"], lambda name: name == "1F1B"))
def test_a_plan_that_says_nothing_of_sharding(ranks: Ranks, schedule: str, wrap: Wrap) -> None:
    """Then parameters are gathered when they are needed, and gradients reduced after the last backward."""
    ranks.run(train_by_bare_plan, schedule, wrap)


def penalty(named: Any) -> Any:
    return 0.1 * sum(parameter.pow(2).sum() for parameter in named.values())


def train_with_added_loss(number: int, wrap: Wrap) -> None:
    """A loss of parameters alone is not one of samples: each copy adds it whole, whatever its part of the batch."""
    grid = Grid(number, "1F1B", wrap)
    grid.schedule.add_loss(penalty)
    for seed in range(2):
        added = penalty(dict(grid.whole.named_parameters()))
        added.backward()
        loss = grid.step(seed)
        grid.check_gradients()
        assert grid.schedule.mean_loss() == pytest.approx(loss + added.item(), rel=1e-12)
        grid.optimize()


@pytest.mark.parametrize("wrap", [copied, sharded])
def test_an_added_loss(ranks: Ranks, wrap: Wrap) -> None:
    ranks.run(train_with_added_loss, wrap)
