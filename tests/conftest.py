"""Settings every test starts from: one thread, and the same random numbers."""

from __future__ import annotations

import pytest
import torch

# Threads change the order of sums, and so the last bits of a result; they also slow tests that share few cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch anew, so that a test gives the same numbers alone and in the whole run."""
    torch.manual_seed(0)
