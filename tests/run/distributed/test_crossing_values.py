"""Values that go from rank to rank: sizes and numbers that depend on the data, values of no_grad or autocast."""

from __future__ import annotations

import pytest
import torch

from pipecut import PlannedSchedule
from pipecut.schedule import plan_for
from tests.run import test_cuts_inside_modes as modes
from tests.run import test_sizes_from_data as sizes
from tests.run.test_sizes_from_data import WIDTH, by_microbatches, cut, loss_fn
from tests.support.ranks import Ranks
from tests.support.training import TIGHT, assert_same_gradients, gradients_of

pytestmark = pytest.mark.distributed

MODELS = [*sizes.MODELS, *modes.MODELS]


def train(rank: int, number: int, name: str) -> None:
    """Steps beside the uncut model, and an evaluation after each."""
    model, pipe = cut(MODELS[number])
    plan = plan_for(name, ranks=2, chunks=pipe.num_stages // 2, microbatches=4)
    mine = [stage for stage, at in enumerate(plan.placement.rank_of) if at == rank]
    stages = [pipe.build_stage(stage, "cpu") for stage in mine]
    schedule = PlannedSchedule(stages, plan, loss_fn)
    names = {name for stage in stages for name, _ in stage.submod.named_parameters()}
    is_last = rank == plan.placement.rank_of[-1]
    within = TIGHT if number < len(sizes.MODELS) else modes.WITHIN
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(2, 10, WIDTH, dtype=next(model.parameters()).dtype)
        expected = by_microbatches(model, x, y, 4)
        model.zero_grad(set_to_none=True)
        schedule.step(*([x] if rank == 0 else []), target=y if is_last else None)
        actual = gradients_of(model)
        assert_same_gradients({name: actual[name] for name in names}, {name: expected[name] for name in names}, within)
        output = schedule.eval(*([x] if rank == 0 else []))
        if is_last:
            torch.testing.assert_close(output, torch.cat([model(part) for part in x.tensor_split(4)]))


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (1, "Interleaved1F1B"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (0, "1F1B"),
                (4, "Interleaved1F1B"),
                (0, "ZB-H1"),
                (1, "ZBVZeroBubble"),
                (2, "GPipe"),
                (3, "1F1B"),
                (5, "ZBVZeroBubble"),
            ]
        ),
    ],
)
def test_two_ranks(two_ranks: Ranks, number: int, name: str) -> None:
    two_ranks.run(train, number, name)
