"""The ranks, shared by all tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stage.replica.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    yield processes
    processes.stop()
