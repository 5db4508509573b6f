"""Settings every test starts from: one thread, the same random numbers; and ranks that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.ranks import Ranks

# Threads change the order of sums, and so the last bits of a result; they also slow tests that share few cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch anew, so that a test gives the same numbers alone and in the whole run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks
