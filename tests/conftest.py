"""Settings of every test: one thread, seeded random numbers, guards against hangs; and the ranks that tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support import limits, properties

if TYPE_CHECKING:
    from tests.support.ranks import Ranks

# Threads change the order of sums, and so the last bits of a result; they also slow tests that share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
properties.load_profile()

RANKS = ("two_ranks", "four_ranks")  # fixtures


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("timeout", None) is None:
        config.option.timeout = limits.HANG


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep processes few: tests that share ranks run on one worker, and so do those of a file that starts its own."""
    for item in items:
        pools = [name for name in RANKS if name in getattr(item, "fixturenames", ())]
        if pools:
            # Tests on two ranks are most of them, and wait much: two workers have such a pool each.
            half = f" {len(item.path.stem) % 2}" if pools[-1] == "two_ranks" else ""
            item.add_marker(pytest.mark.xdist_group(f"{pools[-1]}{half}"))
        elif item.path.parent.name == "zoo":  # transformers takes seconds to import
            item.add_marker(pytest.mark.xdist_group("zoo"))
        elif item.get_closest_marker("distributed"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch anew, so that a test gives the same numbers alone and in the whole run."""
    if "torch" in sys.modules:  # the tests of plans do without
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    from tests.support.ranks import Ranks

    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    from tests.support.ranks import Ranks

    with Ranks(4) as ranks:
        yield ranks
