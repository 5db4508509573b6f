"""Plans written and read as grids, so that a test looks like the plan it is about."""

from __future__ import annotations

from pipecut.schedule import Placement
from pipecut.schedule.plan import Plan
from pipecut.schedule.plan_text import BUBBLE
from pipecut.schedule.rules import Dataflow


def plan_of(
    picture: str,
    *,
    dataflow: Dataflow | None = None,
    placement: Placement | None = None,
    microbatches: int | None = None,
) -> Plan:
    """The plan of a picture: a line for each rank; a dot is a bubble."""
    rows = [[None if cell == BUBBLE else cell for cell in line.split()] for line in picture.strip().splitlines()]
    return Plan.from_actions(rows, dataflow=dataflow, placement=placement, microbatches=microbatches)


def picture_of(plan: Plan) -> str:
    """The rows of a plan as they are written, a line for each rank."""
    return "\n".join(" ".join(BUBBLE if action is None else repr(action) for action in row) for row in plan.actions)


def same(plan: Plan, picture: str) -> bool:
    """Whether a plan has the actions of a picture; it may be drawn with any spaces."""
    return picture_of(plan) == "\n".join(" ".join(line.split()) for line in picture.strip().splitlines())
