"""Planning starts quickly: torch is not imported."""

from __future__ import annotations

import subprocess
import sys

from tests.support.limits import WORK

PLAN = """
import sys
from pipecut.schedule import Costs, plan_for, render, simulate
plan = plan_for("Interleaved1F1B", ranks=2, chunks=2, microbatches=4).lower().validate()
render.svg(simulate(plan, Costs()))
print("torch" in sys.modules)
"""


def test_a_plan_is_made_proven_simulated_and_drawn_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PLAN], check=True, capture_output=True, text=True, timeout=WORK)
    assert done.stdout.strip() == "False"


def test_the_public_names_are_there_when_asked_for() -> None:
    import pipecut

    assert all(getattr(pipecut, name) is not None for name in pipecut.__all__)
    assert set(pipecut.__all__) <= set(dir(pipecut))
    assert not hasattr(pipecut, "pipelin")
    assert not hasattr(pipecut, "ScheduleOfNobody")
    assert pipecut._registered_schedule("Schedule1F1B") is pipecut.Schedule1F1B
