"""Plans that all ranks of a group make together: one plan, measured by all; a failure of one is one of all."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.planning import group_cases as cases
from tests.run.distributed.test_failures import assert_all_fail, outcomes
from tests.support.ranks import Outcome, Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("cost", sampled(["analytic", "measured"], lambda cost: cost == "measured"))
def test_all_ranks_get_one_plan_and_it_trains_as_the_uncut_model(two_ranks: Ranks, cost: str) -> None:
    """Each rank measures other times: on their own they would come to different plans."""
    found = two_ranks.run(cases.trains_as_planned, 2, cost)
    assert found[0][0] == found[1][0]
    off = found[0][1] | found[1][1]
    assert sorted(off) == sorted(name for name, _ in cases.model().named_parameters())
    assert max(off.values()) < 1e-6


@pytest.mark.slow
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


def _fails_on_the_second(found: list[Outcome], error: str, text: str) -> None:
    """The rank that fails says why, the other one says who failed, and neither waits for the other."""
    assert (found[1].error, found[0].error) == (error, "PlanError"), found
    assert text in found[1].text
    assert f"Rank 1 of the group failed: {error}: {found[1].text}" == found[0].text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    sampled(
        [
            ({"schedules": ["Nope"]}, "PlanError", "There is no schedule 'Nope' that trains"),
            ({"memory": "much"}, "InputError", "memory='much': write it as 24GB"),
            ({"batch": 0}, "InputError", "batch must be an integer of at least 1, got 0"),
            (
                {"microbatch": cases.BATCH + 1},
                "InputError",
                f"microbatch={cases.BATCH + 1}: give sizes from 1 to the batch",
            ),
        ],
        lambda case: case[0].keys() <= {"schedules", "batch"},
    ),
)
def test_a_bad_request_of_one_rank(two_ranks: Ranks, options: dict[str, Any], error: str, text: str) -> None:
    _fails_on_the_second(two_ranks.outcomes(cases.asks_for_something_else, ({}, options)), error, text)


def test_an_example_of_one_rank_that_does_not_run(two_ranks: Ranks) -> None:
    found = two_ranks.outcomes(cases.has_another_example, (cases.WIDTH, cases.WIDTH + 1))
    _fails_on_the_second(found, "TraceError", "nor does it run with them uncut")


@pytest.mark.parametrize("at", sampled(["tracing", "measuring", "running"], lambda at: at == "measuring"))
def test_a_progress_that_fails_on_one_rank(two_ranks: Ranks, at: str) -> None:
    found = two_ranks.outcomes(cases.has_a_progress_that_fails, at)
    _fails_on_the_second(found, "RuntimeError", f"no more at {at}")


@pytest.mark.parametrize("what", sampled(["measure", "chain_of", "cut_trace", "prepare"], "cut_trace".__eq__))
def test_a_step_that_fails_on_one_rank(two_ranks: Ranks, what: str) -> None:
    _fails_on_the_second(two_ranks.outcomes(cases.cannot_do_it, what), "OSError", f"no {what}")


@pytest.mark.parametrize(
    ("here", "there", "text"),
    sampled(
        [
            ({}, {"schedules": ["GPipe"]}, "schedules is [1F1B] on this rank, and [GPipe] on rank 1"),
            (
                {"memory": "1GB"},
                {"memory": "1kB"},
                "memory is [1000000000.0, 1000000000.0] on this rank, and [1000.0, ",
            ),
            ({"recompute": True}, {"recompute": False}, "recompute is True on this rank, and False on rank 1"),
            ({}, {"speeds": [1.0, 2.0]}, "speeds is None on this rank, and [1.0, 2.0] on rank 1"),
            ({}, {"time_budget": 1.0}, "time_budget is 0.0 on this rank, and 1.0 on rank 1"),
            ({"microbatch": 2}, {"microbatch": (2, 3)}, "microbatch is [2] on this rank, and [2, 3] on rank 1"),
        ],
        lambda case: "memory" in case[0] or "speeds" in case[1],
    ),
)
def test_ranks_that_ask_for_different_things(
    two_ranks: Ranks, here: dict[str, Any], there: dict[str, Any], text: str
) -> None:
    found = two_ranks.outcomes(cases.asks_for_something_else, (here, there))
    assert [outcome.error for outcome in found] == ["InputError"] * 2
    assert text in found[0].text
    assert found[0].text.endswith("of the group: give the same on all ranks")


def test_a_list_and_a_tuple_are_the_same(two_ranks: Ranks) -> None:
    two_ranks.run(cases.asks_for_something_else, ({"microbatch": [2, 3]}, {"microbatch": (2, 3)}))


def test_models_with_the_same_parameters_that_compute_other_things(two_ranks: Ranks) -> None:
    found = two_ranks.outcomes(cases.has_another_model)
    assert [outcome.error for outcome in found] == ["InputError"] * 2
    assert re.search(
        r"what was traced is 24 operations \(\w+\) on this rank, and 25 operations \(\w+\) on rank 1", found[0].text
    )


@pytest.mark.parametrize(
    ("part", "text"),
    [(None, "evaluation on rank 1"), ("3.wide", "evaluation in 1 modules, '3.wide' among them")],
)
def test_models_in_different_modes(two_ranks: Ranks, part: str | None, text: str) -> None:
    found = two_ranks.outcomes(cases.has_another_mode, part)
    assert [outcome.error for outcome in found] == ["InputError"] * 2
    assert f"the mode of the model is training on this rank, and {text}" in found[0].text


def test_examples_of_different_shapes(two_ranks: Ranks) -> None:
    found = two_ranks.outcomes(cases.has_another_example, (cases.WIDTH, cases.WIDTH))
    assert [outcome.error for outcome in found] == ["InputError"] * 2
    assert "the example is (4, 8) float32 on this rank, and (2, 8) float32 on rank 1" in found[0].text


def test_a_group_that_cannot_run_the_stages(two_ranks: Ranks) -> None:
    options = {"ranks": 4, "cost": "measured"}
    found = two_ranks.outcomes(cases.asks_for_something_else, (options, options))
    assert [outcome.error for outcome in found] == ["InputError"] * 2
    assert (
        'plan(ranks=4, group=...): cost="measured" runs the stages of 4 ranks, and the group has 2: pass a group whose '
        'size is a multiple of 4, a number of ranks that divides 2, or cost="analytic"'
    ) in found[0].text


def test_what_is_no_group(two_ranks: Ranks) -> None:
    for number, text, gone in two_ranks.run(cases.is_no_group):
        assert "plan(group=3): that is not a process group: give torch.distributed.group.WORLD, or what" in number
        assert "plan(group='WORLD'): that is not a process group" in text
        assert "this process is not in the group" in gone
