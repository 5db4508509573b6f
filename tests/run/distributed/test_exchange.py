"""Facts that ranks exchange, and the digests by which they compare what is long."""

import pytest
import torch
from torch import nn

from pipecut.run.handshake import differences, digest, exchange
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


def own_facts(rank: int) -> list[dict[str, str]]:
    """Exchange the facts of each rank twice, as a comparison of two things does."""
    exchange({"turn": "first"}, None)
    return exchange({"rank": str(rank), "weights": digest(nn.Linear(2, 2).weight.shape)}, None)


def test_every_rank_gets_the_facts_of_all_in_their_order(two_ranks: Ranks) -> None:
    for found in two_ranks.run(own_facts):
        assert [known["rank"] for known in found] == ["0", "1"]
        assert differences(found) == ["rank: 0 on rank 0; 1 on rank 1"]


def test_a_fact_that_a_rank_lacks_counts_or_not() -> None:
    facts = [{"loss": "own"}, {}]
    assert differences(facts) == ["loss: own on rank 0; nothing on rank 1"]
    assert differences(facts, absent=None) == []


def test_a_digest_tells_values_dtypes_shapes_and_structures_apart() -> None:
    ones = torch.ones(2, 3)
    like_it = [ones.double(), ones.mT, ones.int(), [ones], (ones,), {"x": ones}, ones + torch.eye(2, 3)]
    values = [ones, *like_it, "x", 1, None]
    digests = [digest(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digests == [digest(value.clone() if isinstance(value, torch.Tensor) else value) for value in values]
