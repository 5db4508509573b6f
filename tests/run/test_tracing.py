"""What a run leaves for those who watch it: the times of the last one, and ranges in a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipecut import PipelineStage, Schedule1F1B
from pipecut.run.executor import ActionContext
from pipecut.run.schedule import PipelineSchedule

X = torch.randn(6, 4)
STEP = ["0F0", "0F1", "0F2", "1F0", "1F1", "1F2", "0B0", "0B1", "0B2", "1B0", "1B1", "1B2"]
EVAL = [action for action in STEP if "F" in action]


def a_schedule() -> PipelineSchedule:
    return Schedule1F1B([PipelineStage(nn.Linear(4, 4), index, 2, "cpu") for index in range(2)], 3, F.mse_loss)


def computed(schedule: PipelineSchedule) -> list[str]:
    """The computations in the timeline."""
    spans = schedule.trace().spans
    assert all(span.start <= span.end for span in spans)
    return sorted(str(span.action) for span in spans if str(span.action) in STEP)


def test_the_timeline_is_that_of_the_last_call() -> None:
    schedule = a_schedule()
    assert schedule.trace().spans == ()
    schedule.tracing = True
    for call, expected in [(schedule.step, STEP), (schedule.eval, EVAL), (schedule.eval, EVAL), (schedule.step, STEP)]:
        call(X, target=X)
        assert computed(schedule) == sorted(expected)


def test_a_call_without_tracing_leaves_no_old_times() -> None:
    schedule = a_schedule()
    schedule.tracing = True
    schedule.step(X, target=X)
    schedule.tracing = False
    schedule.eval(X)
    assert schedule.trace().spans == ()


def test_functions_can_be_registered_when_tracing_is_on() -> None:
    done = []

    def forward(action: Any, context: ActionContext) -> None:
        done.append(str(action))
        context.run(action)

    schedule = a_schedule()
    schedule.tracing = True
    schedule.register_custom_function("F", forward)
    schedule.step(X, target=X)
    assert sorted(done) == EVAL


@pytest.mark.usefixtures("capfd")
def test_every_action_is_a_range_in_a_profile() -> None:
    schedule = a_schedule()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        schedule.step(X, target=X)
    ranges = [event.name for event in profile.events() if event.name.startswith("pipecut ")]
    assert {f"pipecut {action}" for action in STEP} <= set(ranges)
    assert {"pipecut 0SEND_F0", "pipecut 1RECV_F0"} <= set(ranges)
    assert len(ranges) == len(set(ranges))
