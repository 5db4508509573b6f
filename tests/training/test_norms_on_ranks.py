"""Norms over ranks: copies, shards and tensor-parallel parts of stages; errors on every rank where calls differ."""

from __future__ import annotations

import math

import pytest

from tests.run.distributed.test_failures import SHORT, assert_all_fail, outcomes
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training import norm_cases as cases

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", sampled(["DDP", "fully_shard", "TP"], lambda kind: kind == "fully_shard"))
def test_copies_shards_and_parts_count_once_and_whole(four_ranks: Ranks, kind: str) -> None:
    norms = four_ranks.run(cases.clips_under, kind, 2.0)
    assert len(set(norms)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm_type", sampled([1.0, 3.0, math.inf], lambda norm_type: norm_type != 3.0, lambda norm_type: True)
)
@pytest.mark.parametrize("kind", ["DDP", "fully_shard", "TP"])
def test_other_norms_of_copies_shards_and_parts(four_ranks: Ranks, kind: str, norm_type: float) -> None:
    assert len(set(four_ranks.run(cases.clips_under, kind, norm_type))) == 1


def test_an_error_on_one_rank_is_one_on_all_and_the_next_call_works(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(cases.names_no_parameter)
    assert first == last == pytest.approx(1.0)


@pytest.mark.parametrize("kind", sampled(["TP", "fully_shard"], lambda kind: kind == "TP"))
def test_an_error_on_one_shard_or_part_leaves_no_partner_in_a_collective(four_ranks: Ranks, kind: str) -> None:
    """The partner was in the sum of norms, and the rank with the error in the agreement: they met in the wrong one."""
    for wrong, other, norm in four_ranks.run(cases.fails_on_one_part, kind):
        assert wrong.startswith("StepError: the step failed: rank 3 (rank 1 of its pipeline) failed in clip_grad_norm_")
        assert "no parameter of the pipeline is named 'no'" in wrong
        assert other.startswith("StepError: the step failed: rank ")
        assert "the ranks that hold parts of the same stages have gradients of different parameters" in other
        assert norm == pytest.approx(1.0)


def test_names_may_be_those_of_other_ranks_and_of_adapters(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(cases.names_of_all_ranks)
    assert first == last
    assert first[1] == pytest.approx(math.sqrt(3))


def test_a_rank_without_gradients_and_no_gradients_at_all(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(cases.has_a_stage_without_gradients)
    assert first == last > 0


def test_options_that_differ() -> None:
    told = "the ranks call clip_grad_norm_() with different values of max_norm: 1.0, 2.0 on ranks 0 to 1, and"
    assert_all_fail(outcomes(2, cases.passes_other_options), "DisagreementError", told, "pass the same on all ranks")


def test_a_tied_parameter_in_the_groups_of_some_holders_only() -> None:
    told = "the tied parameter embed.weight of stages 0, 1 is among the parameters= of 1 holder of it, and not of the"
    assert_all_fail(outcomes(2, cases.leaves_a_holder_out), "InputError", told, "be in the same group, on every rank")


@pytest.mark.parametrize("who", sampled([0, 1], lambda who: who == 1))
def test_a_rank_that_does_not_call(who: int) -> None:
    found = outcomes(2, cases.stays_away, who, SHORT)[1 - who]
    told = f"rank {1 - who} timed out waiting for rank {who} in clip_grad_norm_() for {SHORT:g} s"
    assert_all_fail([found], "StepError", told, "does not answer")


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_in_another_call(who: int) -> None:
    found = outcomes(2, cases.steps_instead, who)
    assert_all_fail(found, "StepError", "rank 0 called", "make the same calls in the same order on every rank")
