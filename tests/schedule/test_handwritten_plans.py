"""Four schedules that users wrote by hand: V-shaped, unbalanced, with weight gradients apart, with own transfers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecut.schedule.plan import Plan
from tests.schedule.blocking_channels import RAN, execute
from tests.schedule.plan_pictures import same

USER_MADE: dict[str, dict[int, list[str | None]]] = {
    "VShaped": {
        0: ["0F0", None, None, "3F0", "3B0", None, None, "0B0"],
        1: [None, "1F0", "2F0", None, None, "2B0", "1B0", None],
    },
    "Unbalanced": {
        0: ["0F0", "1F0", None, None, "4F0", "4B0", None, None, "1B0", "0B0"],
        1: [None, None, "2F0", "3F0", None, None, "3B0", "2B0", None, None],
    },
    "WithW": {
        0: ["0F0", "0F1", "2F0", "2F1", None, "2I0", "2W0", "0I0", "2I1", "0W0", "0I1", "2W1", "0W1"],
        1: [None, "1F0", "1F1", "3F0", "3I0", "3F1", "1I0", "3I1", "3W0", "1I1", "1W0", "3W1", "1W1"],
    },
    "WithReorderedB": {
        0: ["0F0", "0F1", "0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1", "0B0", "0B1"],
        1: ["1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1B1", "1SEND_B0", "1SEND_B1"],
    },
}
RANKS_OF = {"VShaped": (0, 1, 1, 0), "Unbalanced": (0, 0, 1, 1, 0), "WithW": (0, 1, 0, 1), "WithReorderedB": (0, 1)}


@pytest.mark.parametrize("name", USER_MADE)
def test_schedules_made_by_users(name: str) -> None:
    plan = Plan.from_actions(USER_MADE[name], name=name)
    assert plan.placement.rank_of == RANKS_OF[name]
    assert plan.training
    assert execute(plan.validate()) == RAN
    for max_held in (None, 1, 2):
        for receives in ("as_sent", "early", "late"):
            assert execute(plan.lower(max_held=max_held, receives=receives).validate()) == RAN


def test_the_v_shaped_schedule_lowered() -> None:
    assert same(
        Plan.from_actions(USER_MADE["VShaped"]).lower(),
        """
        0F0 0SEND_F0          3RECV_F0 3F0 3B0 3SEND_B0          0RECV_B0 0B0
            1RECV_F0 1F0 2F0  2SEND_F0         2RECV_B0 2B0 1B0  1SEND_B0
        """,
    )


def test_the_unbalanced_schedule_lowered() -> None:
    assert same(
        Plan.from_actions(USER_MADE["Unbalanced"]).lower(),
        """
        0F0 1F0 1SEND_F0          4RECV_F0 4F0 4B0 4SEND_B0          1RECV_B0 1B0 0B0
                2RECV_F0 2F0 3F0  3SEND_F0         3RECV_B0 3B0 2B0  2SEND_B0
        """,
    )


@pytest.mark.parametrize("name", USER_MADE)
def test_through_a_file(name: str, tmp_path: Path) -> None:
    plan = Plan.from_actions(USER_MADE[name], name=name)
    for each in (plan, plan.lower(), plan.lower(max_held=1)):
        each.save_csv(tmp_path / "plan.csv")
        read = Plan.load_csv(tmp_path / "plan.csv", name=name).validate()
        assert (read.placement, read.microbatches, read.dataflow) == (each.placement, each.microbatches, each.dataflow)
        assert read.grid() == each.grid()
        assert read.lower() == each.lower()
