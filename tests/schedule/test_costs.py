"""Costs: numbers for a rank or for each stage, the time of a message, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest

from pipecut.errors import PlanError
from pipecut.schedule import Placement
from pipecut.schedule.action import Op
from pipecut.schedule.costs import Costs, CostTable, Link
from pipecut.schedule.plan import Plan

# Rank 0 has stages 0 and 3, rank 1 has stages 1 and 2, rank 2 has stage 4.
PLACEMENT = Placement.explicit([0, 1, 1, 0, 2])
PLAN = Plan.from_actions([["0F0", "3F0"], ["1F0", "2F0"], ["4F0"]], name="mixed", placement=PLACEMENT)
STAGES = PLAN.stages


def table(**given: Any) -> CostTable:
    return Costs(**given).table(PLAN)


def refused(**given: Any) -> str:
    """The message of the error that these costs give, at once or for the plan."""
    with pytest.raises(PlanError) as error:
        table(**given)
    return str(error.value)


# ---------------------------------------------------------------- one number for a rank, or one for each stage


def test_a_plain_number_is_divided_among_the_stages_of_a_rank() -> None:
    costs = table(forward=6, backward_input=4, backward_weight=2, memory_forward=8)
    assert costs.time[Op.FORWARD] == (3, 3, 3, 3, 6)
    assert costs.time[Op.BACKWARD_INPUT] == (2, 2, 2, 2, 4)
    assert costs.time[Op.BACKWARD_WEIGHT] == (1, 1, 1, 1, 2)
    assert costs.memory[Op.FORWARD] == (4, 4, 4, 4, 8)


@pytest.mark.parametrize("given", [[1, 2, 3, 4, 5], (1, 2, 3, 4, 5), range(1, 6), {4: 5, 3: 4, 2: 3, 1: 2, 0: 1}])
def test_a_value_for_each_stage_is_taken_as_it_is(given: Any) -> None:
    costs = table(forward=given, memory_backward_weight=given)
    assert costs.time[Op.FORWARD] == (1, 2, 3, 4, 5)
    assert costs.memory[Op.BACKWARD_WEIGHT] == (1, 2, 3, 4, 5)


def test_a_full_backward_is_both_halves_unless_it_is_given() -> None:
    halves: dict[str, Any] = {"backward_input": 4, "backward_weight": [1, 2, 3, 4, 5]}
    assert table(**halves).time[Op.FULL_BACKWARD] == (3, 4, 5, 6, 9)
    assert table(**halves, full_backward=2).time[Op.FULL_BACKWARD] == (1, 1, 1, 1, 2)
    assert table(**halves, full_backward=0).time[Op.FULL_BACKWARD] == (0,) * STAGES


def test_a_full_backward_frees_what_both_halves_free() -> None:
    costs = table(memory_backward_input=-2, memory_backward_weight=-6, full_backward=1)
    assert costs.memory[Op.FULL_BACKWARD] == (-4, -4, -4, -4, -8)


def test_without_arguments_everything_takes_one_and_memory_comes_back_to_nothing() -> None:
    costs = Costs().table(Plan.from_actions([["0F0", "0B0"]]))
    assert {op: times[0] for op, times in costs.time.items()} == {
        Op.FORWARD: 1,
        Op.BACKWARD_INPUT: 1,
        Op.BACKWARD_WEIGHT: 1,
        Op.FULL_BACKWARD: 2,
    }
    assert costs.memory[Op.FORWARD][0] + costs.memory[Op.FULL_BACKWARD][0] == 0


def test_costs_keep_what_they_were_given_when_the_caller_changes_it() -> None:
    times, sizes, links = [1.0] * STAGES, {(0, 1): 8.0}, {(0, 1): 1.0}
    costs = Costs(forward=times, message_bytes=sizes, transfer=links)
    times[0], sizes[0, 1], links[0, 1] = 9.0, 9.0, 9.0
    assert costs == Costs(forward=[1.0] * STAGES, message_bytes={(0, 1): 8.0}, transfer={(0, 1): 1.0})


def test_costs_can_be_copied_and_sent_to_another_process() -> None:
    costs = Costs(forward={0: 1.0}, transfer={(0, 1): Link(1.0, 2.0)}, message_bytes={(0, 1): 8.0})
    assert copy.deepcopy(costs) == costs
    assert pickle.loads(pickle.dumps(costs)) == costs


# ---------------------------------------------------------------- messages


def test_a_plain_transfer_time_is_not_divided_among_the_stages() -> None:
    costs = Costs(transfer=0.6)
    assert costs.message_time(PLACEMENT, Op.SEND_F, 0, 1) == 0.6
    assert costs.message_time(PLACEMENT, Op.SEND_B, 4, 3) == 0.6


def test_a_link_takes_its_latency_and_the_bytes_over_the_bandwidth() -> None:
    costs = Costs(transfer=Link(latency=2.0, bandwidth=5.0), message_bytes=10)
    assert costs.message_time(PLACEMENT, Op.SEND_F, 0, 1) == 4.0


def test_a_gradient_has_the_size_of_its_activation_and_the_link_of_its_own_direction() -> None:
    slow, quick = Link(latency=0.0, bandwidth=1.0), Link(latency=0.0, bandwidth=10.0)
    costs = Costs(transfer={(0, 1): slow, (1, 0): quick, (0, 2): 7}, message_bytes={(0, 1): 50, (2, 3): 20})
    assert costs.message_time(PLACEMENT, Op.SEND_F, 0, 1) == 50
    assert costs.message_time(PLACEMENT, Op.SEND_B, 1, 0) == 5
    assert costs.message_time(PLACEMENT, Op.SEND_F, 2, 3) == 2
    assert costs.message_time(PLACEMENT, Op.SEND_F, 3, 4) == 7, "a plain time needs no bytes"


def test_a_pair_of_ranks_without_a_transfer_time_is_named() -> None:
    with pytest.raises(PlanError, match=re.escape("from rank 1 to rank 0: add transfer[(1, 0)].")):
        Costs(transfer={(0, 1): 1.0}).message_time(PLACEMENT, Op.SEND_B, 1, 0)


def test_an_edge_without_a_size_is_named_as_maker_and_user() -> None:
    costs = Costs(transfer=Link(1.0, 1.0), message_bytes={(0, 1): 8})
    expected = "between stage 2, its maker, and stage 3, its user: add message_bytes[(2, 3)]."
    with pytest.raises(PlanError, match=re.escape(expected)):
        costs.message_time(PLACEMENT, Op.SEND_B, 3, 2)


# ---------------------------------------------------------------- what is refused

TIMES = ["forward", "backward_input", "backward_weight", "full_backward"]
MEMORY = ["memory_forward", "memory_backward_input", "memory_backward_weight"]
PER_STAGE = TIMES + MEMORY


@pytest.mark.parametrize("name", TIMES)
def test_negative_times(name: str) -> None:
    assert refused(**{name: -1}) == f"{name}=-1 is negative: give 0 or more."
    assert refused(**{name: [1, 1, -0.5, 1, 1]}) == f"{name}[2]=-0.5 is negative: give 0 or more."
    assert refused(**{name: {0: 1, 3: -2}}) == f"{name}[3]=-2 is negative: give 0 or more."


@pytest.mark.parametrize(("name", "op"), list(zip(MEMORY, "FIW", strict=True)))
def test_memory_may_be_freed(name: str, op: str) -> None:
    assert table(**{name: -3}).memory[Op(op)] == (-1.5, -1.5, -1.5, -1.5, -3)


@pytest.mark.parametrize("name", [*PER_STAGE, "transfer", "message_bytes"])
@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (10**400, "inf")])
def test_numbers_that_are_not_finite(name: str, value: float, shown: str) -> None:
    assert refused(**{name: value}) == f"{name}={shown} is not finite: give a finite number."


@pytest.mark.parametrize("name", PER_STAGE)
def test_sequences_of_another_length_than_the_plan_has_stages(name: str) -> None:
    assert refused(**{name: [1, 1, 1]}) == (
        f"{name} has no value for stage 3: the plan 'mixed' has stages 0 to 4; give one for each."
    )
    assert refused(**{name: []}).startswith(f"{name} has no value for stage 0: ")
    assert refused(**{name: [1] * 7}) == (
        f"{name} has a value for stage 5, but the plan 'mixed' has stages 0 to 4; remove it."
    )


@pytest.mark.parametrize("name", PER_STAGE)
def test_mappings_without_a_stage_or_with_one_too_many(name: str) -> None:
    assert refused(**{name: {0: 1, 1: 1, 3: 1, 4: 1}}).startswith(f"{name} has no value for stage 2: ")
    assert refused(**{name: dict.fromkeys(range(-1, 5), 1)}).startswith(f"{name} has a value for stage -1, but ")
    assert refused(**{name: {"first": 1}}) == (
        f"{name} has the key 'first': its keys are the numbers of stages, 0, 1, 2..."
    )


@pytest.mark.parametrize("name", PER_STAGE)
@pytest.mark.parametrize("value", ["18.5", b"1", 1j, object, {1, 2}])
def test_what_is_no_cost_at_all(name: str, value: object) -> None:
    assert refused(**{name: value}) == (
        f"{name}={value!r}: give a number for a rank's work on one microbatch, a list with one for each stage, "
        "or a dict from stage to number."
    )


@pytest.mark.parametrize("name", ["forward", "backward_input", "memory_forward"])
def test_none_stands_for_a_default_in_the_full_backward_only(name: str) -> None:
    assert refused(**{name: None}).startswith(f"{name}=None: give a number")


@pytest.mark.parametrize("value", ["2", None, True, [1]])
def test_what_is_no_number_inside_a_list(value: object) -> None:
    assert refused(forward=[1, value, 1, 1, 1]) == f"forward[1]={value!r} is not a number: give one such as 18.5."


def test_truth_values_are_no_numbers() -> None:
    assert refused(forward=True) == "forward=True is not a number: give one such as 18.5."


@pytest.mark.parametrize("value", ["0.6", None, [0.6], {0.6}])
def test_what_is_no_transfer_time(value: object) -> None:
    expected = (
        "give the time that a message takes, a Link(latency, bandwidth), or a dict from (source rank, target rank) to "
        "these."
    )
    assert refused(transfer=value) == f"transfer={value!r}: {expected}"
    assert refused(transfer={(0, 1): value}) == f"transfer[(0, 1)]={value!r}: {expected}"


def test_negative_transfers_and_sizes() -> None:
    assert refused(transfer=-0.6) == "transfer=-0.6 is negative: give 0 or more."
    assert refused(transfer={(0, 1): -1}) == "transfer[(0, 1)]=-1 is negative: give 0 or more."
    assert refused(message_bytes=-8) == "message_bytes=-8 is negative: give 0 or more."
    assert refused(message_bytes={(0, 1): -8}) == "message_bytes[(0, 1)]=-8 is negative: give 0 or more."
    assert refused(message_bytes="8") == "message_bytes='8' is not a number: give one such as 18.5."


@pytest.mark.parametrize("key", [0, "01", (0,), (0, 1, 2), ("0", "1")])
def test_keys_that_are_no_pairs(key: object) -> None:
    ranks, stages = "(source rank, target rank)", "(maker stage, user stage)"
    assert refused(transfer={key: 1}) == f"transfer has the key {key!r}: its keys are pairs {ranks}, such as (0, 1)."
    assert refused(message_bytes={key: 1}) == (
        f"message_bytes has the key {key!r}: its keys are pairs {stages}, such as (0, 1)."
    )


NO_MESSAGE = "no message would ever arrive; give the bytes that pass in one unit of time, more than 0."


@pytest.mark.parametrize(
    ("latency", "bandwidth", "expected"),
    [
        (0, 0, f"bandwidth=0: {NO_MESSAGE}"),
        (0, -1, f"bandwidth=-1: {NO_MESSAGE}"),
        (-1, 1, "latency=-1 is negative: give 0 or more."),
        (0, float("inf"), "bandwidth=inf is not finite: give a finite number."),
        (float("nan"), 1, "latency=nan is not finite: give a finite number."),
        ("1", 1, "latency='1' is not a number: give one such as 18.5."),
    ],
)
def test_links_that_cannot_be(latency: Any, bandwidth: Any, expected: str) -> None:
    with pytest.raises(PlanError) as error:
        Link(latency, bandwidth)
    assert str(error.value) == expected


@pytest.mark.parametrize("transfer", [Link(0.1, 100), {(0, 1): Link(0.1, 100)}])
def test_a_link_needs_the_size_of_a_message(transfer: Any) -> None:
    """Without one the bandwidth had no effect, and nobody was told."""
    assert refused(transfer=transfer) == (
        "transfer has a Link, whose time depends on the size of a message: give message_bytes too."
    )
