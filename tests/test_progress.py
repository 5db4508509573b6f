"""Lines about work that takes long: on a terminal only, after two seconds, none twice; in the log in any case."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from torch import nn

import pipecut
from pipecut import text
from pipecut.text import phase, still

LOG = logging.getLogger("pipecut.tests")


class Terminal(io.StringIO):
    """A stderr that is one, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test turns."""
    now = [100.0]
    monkeypatch.setattr(text.time, "monotonic", lambda: now[0])
    return now


def stderr(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True) -> Terminal:
    made = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", made)
    return made


def work(clock: list[float]) -> None:
    """Trace for five seconds, then write for one."""
    with phase(LOG, "cutting"):
        with phase(LOG, "tracing"):
            for second in range(5):
                clock[0] += 1
                still(f"tracing layer {second}")
                still(f"tracing layer {second}")
        with phase(LOG, "writing"):
            clock[0] += 1


def test_lines_begin_after_two_seconds_and_none_comes_twice(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    err = stderr(monkeypatch)
    work(clock)
    lines = err.getvalue().splitlines()
    assert lines == [
        "pipecut: tracing layer 1 (2 s so far)",
        "pipecut: tracing layer 3 (4 s so far)",
        "pipecut: writing (5 s so far)",
    ]


def test_quick_work_says_nothing(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    err = stderr(monkeypatch)
    for _ in range(3):
        with phase(LOG, "cutting"):
            clock[0] += 1.5
    still("nothing is being done")
    assert err.getvalue() == ""


def test_a_file_gets_no_lines_and_the_log_does(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    err = stderr(monkeypatch, is_terminal=False)
    with caplog.at_level(logging.DEBUG, "pipecut"):
        work(clock)
    assert err.getvalue() == ""
    assert caplog.messages == ["tracing took 5.00 s", "writing took 1.00 s", "cutting took 6.00 s"]


def test_work_that_fails_ends(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    err = stderr(monkeypatch)
    with pytest.raises(ZeroDivisionError), phase(LOG, "cutting"):
        raise ZeroDivisionError
    clock[0] += 60
    with phase(LOG, "cutting"):
        clock[0] += 1
    assert err.getvalue() == ""


def test_pipeline_logs_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with caplog.at_level(logging.DEBUG, "pipecut"):
        pipecut.pipeline(model, (torch.ones(2, 4),), num_stages=2)
    records = [record for record in caplog.records if record.name.startswith("pipecut.")]  # torch has loggers too
    said = [record.getMessage().partition(" took")[0] for record in records if " took" in record.getMessage()]
    assert said == [
        "tracing the model",
        "finding where to cut",
        "running the model again, to compare",
        "writing the code of the stages",
        "cutting Sequential",
    ]
