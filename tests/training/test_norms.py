"""The norm of a pipeline's gradients, and clipping by it, beside torch.nn.utils on the uncut model: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipecut import clip_grad_norm_, get_total_norm
from pipecut.run import PipelineSchedule
from tests.support.ranks import Ranks
from tests.training.exact_models import Case

QUICK, ALL = 6, 200


def clip(case: Case, schedule: PipelineSchedule) -> Tensor:
    return clip_grad_norm_(schedule, case.max_norm, case.norm_type, foreach=case.foreach)


def check_in_one_process(number: int) -> None:
    case = Case.random(number)
    schedule = case.schedule()
    schedule.step(case.x, target=case.target)
    case.step_uncut()
    case.check_gradients(schedule.stages)
    for _ in range(2):
        norm = get_total_norm(schedule, case.norm_type, foreach=case.foreach)
        clipped, expected = clip(case, schedule), case.expected()
        assert torch.equal(norm, clipped)
        assert torch.equal(clipped, expected), f"case {number}: {clipped} and {expected}"
        case.check_gradients(schedule.stages)
        case.change_gradients(schedule)


@pytest.mark.parametrize("number", range(QUICK))
def test_random_models_have_the_bits_of_the_uncut_ones(number: int) -> None:
    check_in_one_process(number)


@pytest.mark.slow
def test_many_random_models_have_the_bits_of_the_uncut_ones() -> None:
    for number in range(QUICK, ALL):
        check_in_one_process(number)


def check_on_ranks(rank: int, numbers: list[int]) -> list[float]:
    norms = []
    for number in numbers:
        case = Case.random(number, ranks=2)
        schedule = case.schedule(rank)
        schedule.step(*((case.x,) if rank == 0 else ()), **({"target": case.target} if rank else {}))
        case.step_uncut()
        case.check_gradients(schedule.stages)
        for _ in range(2):
            norm, expected = clip(case, schedule), case.expected()
            assert torch.equal(norm, expected), f"case {number}: {norm} and {expected}"
            case.check_gradients(schedule.stages)
            norms.append(norm.item())
            case.change_gradients(schedule)
    return norms


@pytest.mark.distributed
def test_random_models_on_ranks(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(check_on_ranks, list(range(QUICK)))
    assert first == last


@pytest.mark.slow
@pytest.mark.distributed
def test_many_random_models_on_ranks(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(check_on_ranks, list(range(QUICK, ALL)))
    assert first == last
