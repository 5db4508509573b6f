"""Settings of every test: one thread, seeded random numbers, guards against hangs; and the ranks that tests share."""

from __future__ import annotations

import gc
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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("timeout", None) is None:
        config.option.timeout = limits.HANG
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, and not each time at all that was imported; and less often."""
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)  # models and traces hold cycles, but never much memory
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep processes and imports few: tests that share ranks, transformers or the like run on one worker."""
    for item in items:
        group = _group_of(item)
        if group is not None:
            # `@` and a group is what `--dist loadgroup` goes by; xdist 3.8 writes it where pytest 9.2 does not read it.
            item._id = type(item.id).parse(f"{item.nodeid}@{group}")


def _group_of(item: pytest.Item) -> str | None:
    """Return the name of the tests that run on the same worker as a test, if there are any."""
    if item.path.parent.name in ("zoo", "integrations"):
        return "transformers"
    pools = {"two_ranks", "four_ranks"}.intersection(getattr(item, "fixturenames", ()))
    if pools:
        return min(pools)
    alone = item.get_closest_marker("distributed") or item.path.stem == "test_rooms"  # which reads the package once
    return item.path.stem if alone else None


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
