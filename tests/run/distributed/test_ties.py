"""A parameter that ranks share: its gradient is the sum over them, and all holders keep the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.run.distributed import tie_cases as cases
from tests.run.distributed.test_failures import assert_all_fail, outcomes
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble"])
def test_ties_of_modules_cut_by_hand(two_ranks: Ranks, name: str) -> None:
    held = two_ranks.run(cases.trains_by_hand, 2, name)
    weights = [weight for rank in held for weight in rank.values()]
    assert len(weights) == 2
    assert torch.equal(*weights)  # the same bits


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("who", [0, 1])
def test_a_tied_parameter_that_one_rank_freezes_is_an_error_on_all(traced: bool, who: int) -> None:
    found = outcomes(2, cases.freezes_on_one, traced, who)
    name = "embed.weight" if traced else "weight of stage 0"
    told = f"the tied parameter {name} is frozen in stage {who} and trained in stage {1 - who}"
    assert_all_fail(found, "StepError", told, "requires_grad_()", "REDUCE_TIES0 (stage", ", tie 0)")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "values",
            "values of the tied parameter weight of stage 0 (seed the model, or load a checkpoint, alike on all",
        ),
        (
            "shape",
            "tied parameter weight of stage 0 (make it alike in all its stages: shape, dtype, and what "
            "parallelize_module and fully_shard do with it): float32[9, 8] on rank 0; float32[11, 8] on rank 1",
        ),
        (
            "declared on one",
            "holders of the tied parameter weight of stage 0: weight of stage 0, weight of stage 1 on rank 0; "
            "nothing on rank 1",
        ),
    ],
)
def test_holders_that_differ(what: str, told: str) -> None:
    assert_all_fail(outcomes(2, cases.declares, what), "DisagreementError", told)


def test_a_tied_parameter_that_all_ranks_freeze_for_a_while(two_ranks: Ranks) -> None:
    two_ranks.run(cases.freezes_on_all)
