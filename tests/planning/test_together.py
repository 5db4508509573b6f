"""Plans that all ranks of a group make together: one plan, measured by all; a failure of one is one of all."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.test_faults import assert_all_fail, outcomes
from tests.planning import group_cases as cases

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("cost", ["analytic", "measured"])
def test_all_ranks_get_one_plan_and_it_trains_as_the_uncut_model(two_ranks: Ranks, cost: str) -> None:
    """Each rank measures other times: on their own they would come to different plans."""
    found = two_ranks.run(cases.trains_as_planned, 2, cost)
    assert found[0][0] == found[1][0]
    off = found[0][1] | found[1][1]
    assert sorted(off) == sorted(name for name, _ in cases.model().named_parameters())
    assert max(off.values()) < 1e-6


def test_two_copies_of_a_pipeline_measure_together(four_ranks: Ranks) -> None:
    plans = four_ranks.run(_plan_of_two)
    assert len(set(plans)) == 1


def _plan_of_two(rank: int) -> str:
    found = cases.planned(2, cost="measured", schedules=["1F1B"])
    assert found.ranks == 2
    return repr((found.cuts, found.report.costs))


def test_the_link_is_that_of_neighbours(two_ranks: Ranks) -> None:
    for found in two_ranks.run(cases.measures_the_link):
        latency, bandwidth = found
        assert 0 < latency < 1
        assert 1e5 < bandwidth < 1e12


def test_ranks_that_plan_different_things(two_ranks: Ranks) -> None:
    found = two_ranks.outcomes(cases.asks_for_another_batch, 2)
    assert [outcome.error for outcome in found] == ["InputError"] * 2
    assert "batch is 12 on this rank, and 13 on rank 1 of the group: give the same on all ranks" in found[0].text
    assert "batch is 13 on this rank, and 12 on rank 0" in found[1].text


def test_a_rank_outside_the_group(two_ranks: Ranks) -> None:
    inside, outside = two_ranks.run(cases.is_not_in_the_group, 2)
    assert not inside
    assert "this process is not in the group: call plan() with it on the ranks of the group only" in outside


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_fails_on_one_rank_fails_on_all(everywhere: bool) -> None:
    who = 1 if everywhere else 0
    found = outcomes(2, cases.fails_on_one, 2, who, everywhere)
    assert (found[who].error, found[who].text) == ("ValueError", "no luck")
    other = found[1 - who]
    assert (other.error, other.text) == ("PlanError", f"Rank {who} of the group failed: ValueError: no luck")


def test_a_memory_that_nothing_fits_is_an_error_on_all_ranks() -> None:
    assert_all_fail(outcomes(2, cases.finds_nothing_that_fits, 2), "PlanError", "the least that would do is about")
