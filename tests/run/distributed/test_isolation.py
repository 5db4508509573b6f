"""On separate ranks a stage that reaches past the trace for what another holds is an error on all ranks."""

from __future__ import annotations

import pytest

from tests.run.distributed import isolation_cases as cases
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


def test_every_leak_is_an_error_on_all_ranks(two_ranks: Ranks) -> None:
    """Each of these was silently wrong: the gradient, or the new value, stayed on the rank that made it."""
    told = {
        "regularises_all": "stage 1 uses 0.linear.weight (of stage 0) at isolation_cases.py:",
        "hook_with_a_weight": "stage 1 uses 0.linear.weight (of stage 0) at isolation_cases.py:",
        "hook_that_writes": "stage 1 changes 1.calls (of stage 0) in 1F0",
        "loss_of_a_list": "stage 0 changes 'collected' of loss_of_a_list.<locals>.<lambda> in 0F0, which loss_fn uses",
        "hook_with_a_backward": "stage 1 gives a gradient to 0.linear.bias (of stage 0) in 1B0",
        "layers_that_share_a_count": "'3' changes 'COUNTS' in tests.run.distributed.isolation_cases, which '0' of "
        "stage 0 uses, and that module does something else from call to call",
    }
    remedies = {
        "loss_of_a_list": "Let the model return what loss_fn needs",
        "layers_that_share_a_count": "let each module have an object of its own",
    }
    for errors in two_ranks.run(cases.every_leak):
        assert errors.keys() == told.keys()
        for name, text in told.items():
            assert text in errors[name]
            assert remedies.get(name, "schedule.add_loss()") in errors[name]


def test_layers_that_each_have_a_count(two_ranks: Ranks) -> None:
    two_ranks.run(cases.layers_that_count_alone)


def test_a_regularisation_of_all_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(cases.adds_a_loss)


def test_a_loss_that_one_rank_adds(two_ranks: Ranks) -> None:
    for error in two_ranks.run(cases.adds_a_loss_on_one_rank):
        assert "losses added by add_loss(): 0 on rank 0; 1 on rank 1" in error


def test_what_one_rank_changed_after_the_cut(two_ranks: Ranks) -> None:
    for errors in two_ranks.run(cases.replaced_and_switched):
        assert "2.linear.weight, 2.linear.bias, 3.linear.weight, 3.linear.bias of the model" in errors["replaced"]
        assert "the model was put in evaluation mode after stage 1 was built" in errors["switched"]
