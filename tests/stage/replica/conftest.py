"""The ranks of these tests: the four that all tests share."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks


@pytest.fixture
def ranks(four_ranks: Ranks) -> Ranks:
    return four_ranks
