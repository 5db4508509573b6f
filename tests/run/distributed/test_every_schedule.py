"""Every schedule on 2 and 4 gloo ranks, traced and cut by hand, gives the gradients of the uncut model."""

from __future__ import annotations

import pytest

from pipecut.schedule import Plan, plan_for
from pipecut.schedule.registry import FAMILIES
from tests.run.distributed.training_cases import check_plan, check_schedule, train_tied
from tests.schedule.test_handwritten_plans import USER_MADE
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed

SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]


def microbatch_counts(name: str, world: int) -> list[int]:
    """Below, equal to and above the number of stages; DualPipeV refuses less."""
    stages = world * FAMILIES[name].chunks
    return [count for count in (world - 1, stages, stages + 1) if name != "DualPipeV" or count >= stages]


@pytest.mark.parametrize(
    ("name", "traced"),
    sampled(
        [(name, traced) for name in SCHEDULES for traced in (True, False)],
        lambda case: case[1] == (case[0] in ("1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")),
    ),
)
def test_two_ranks(two_ranks: Ranks, name: str, traced: bool) -> None:
    two_ranks.run(check_schedule, 2, name, traced, microbatch_counts(name, 2))


@pytest.mark.parametrize(
    ("name", "traced"),
    sampled(
        [*((name, True) for name in SCHEDULES), *((name, False) for name in ("1F1B", "Interleaved1F1B", "DualPipeV"))],
        lambda case: case == ("ZBVZeroBubble", True),
    ),
)
def test_four_ranks(four_ranks: Ranks, name: str, traced: bool) -> None:
    four_ranks.run(check_schedule, 4, name, traced, microbatch_counts(name, 4))


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", USER_MADE)
def test_schedules_made_by_users(two_ranks: Ranks, name: str, traced: bool) -> None:
    plan = Plan.from_actions(USER_MADE[name], name=name)
    two_ranks.run(check_plan, plan, traced and name != "WithReorderedB")


def test_a_plan_with_transfers(four_ranks: Ranks) -> None:
    plan = plan_for("InterleavedZeroBubble", ranks=4, chunks=2, microbatches=5)
    four_ranks.run(check_plan, plan.lower(receives="early"), False)


@pytest.mark.parametrize(
    "name", sampled(["1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble"], lambda name: name == "ZBVZeroBubble")
)
def test_tied_parameters_stay_the_same_bits_on_all_ranks_that_hold_them(four_ranks: Ranks, name: str) -> None:
    digests = four_ranks.run(train_tied, 4, name, 4)
    holders = [rank for rank, held in enumerate(digests) if {"embed.weight", "head.weight"} & held.keys()]
    assert holders == ([0] if name == "ZBVZeroBubble" else [0, 3])  # in a V the first rank has both ends
    values = {held[key] for held in digests for key in ("embed.weight", "head.weight") if key in held}
    assert len(values) == 1
