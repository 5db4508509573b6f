"""The runner of the benchmarks: it ends what it has started, and survives what a benchmark does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from tests.support.limits import WORK

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_ended_by_a_signal_it_ends_its_benchmark() -> None:
    """A runner that was asked to end left its benchmark running, which took a core from all that came after it."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks", "planning"], cwd=ROOT, stdout=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + WORK
    while not (found := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=WORK)
    assert b"goals" in printed
    assert process.returncode == 1
    for child in found:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)


def test_a_benchmark_that_is_killed_has_missed_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may have written a part of a line."""
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\n"
        """printf '{"what": "a", "value": 1.0, "limit": 2.0}\\n{"wh' > "$1"; kill -9 $$\n"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    outcome = runner._run_apart("planning", 1, 60)
    assert [(goal.what, goal.is_met) for goal in outcome.goals] == [
        ("a", True),
        ("ran without an error (exit code)", False),
    ]
