"""Calls whose microbatches do not fit the trace raise an error that distinguishes the whole call from its parts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, Schedule1F1B, SplitPoint, TensorChunkSpec, pipeline
from pipecut.run.schedule import PipelineSchedule
from tests.support.models import WIDTH, chain_pipe, chain_problem, traced_stages


class Fixed(nn.Module):
    """A model that works for 8 rows only, such as one that unrolls a sequence; the samples are in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.stack(torch.unbind(self.first(x))[:8]))
        return out


def schedule_of(example: Tensor, **specs: TensorChunkSpec) -> PipelineSchedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sizes that are fixed
        pipe = pipeline(Fixed(), (example,), split_spec={"second": SplitPoint.BEGINNING})
    return Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2, F.mse_loss, **specs)


def test_a_batch_of_the_size_that_was_traced() -> None:
    x = torch.randn(8, 4, 6)
    with pytest.raises(InputError) as error:
        schedule_of(x).step(x, target=x)
    text = str(error.value)
    assert (
        "microbatch 0 does not fit, with 4 of the 8 samples that the call has along dim 0, in 2 microbatches:" in text
    )
    assert "x has size 4 in dim 0; the trace holds for 8 only" in text
    assert (
        "The trace holds for microbatches of the example's size: pass so large a batch; or, if the samples are" in text
    )
    assert "make the schedule with args_chunk_spec or kwargs_chunk_spec: TensorChunkSpec(dim), or Replicate()" in text


def test_what_the_remedy_says_works() -> None:
    x = torch.randn(8, 4, 6)
    along = TensorChunkSpec(1)
    schedule = schedule_of(x[:, :2], args_chunk_spec=along, output_merge_spec=along, target_chunk_spec=along)
    assert schedule.step(x, target=x).shape == x.shape


def test_what_does_not_fit_as_a_whole_is_told_of_the_whole() -> None:
    problem = chain_problem(2, samples=4)
    schedule = Schedule1F1B(traced_stages(chain_pipe(problem)), 2, F.mse_loss)
    with pytest.raises(InputError, match=r"^this call does not fit the trace of Chain:\n  \w+ has 3 dims \[4, 1, "):
        schedule.step(torch.zeros(4, 1, WIDTH).double(), target=problem.target)


def test_arguments_like_those_of_the_step_before_are_cut_by_what_is_known_of_them() -> None:
    """A kind of call is checked once; another one, or one tensor passed twice, is looked at again."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
            return self.second(self.first(x) + y) * scale

    model = Two()
    one, other, batch = torch.randn(6, 4), torch.randn(6, 4), torch.randn(9, 4)
    pipe = pipeline(model, (one[:2], other[:2]), split_spec={"second": SplitPoint.BEGINNING})
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 3, F.mse_loss)
    for args, kwargs in (
        ((one, one), {}),
        ((one, other), {}),
        ((other, one), {}),
        ((one,), {"y": other}),
        ((batch, batch + 1), {}),
        ((one, one), {}),
        ((other, one), {"scale": 2.0}),
    ):
        assert torch.allclose(schedule.eval(*args, **kwargs), model(*args, **kwargs), atol=1e-6)
    with pytest.raises(InputError, match="scale was 2.0 when the model was traced"):
        schedule.eval(one, other, scale=3.0)
    with pytest.raises(InputError, match="the trace holds for 4 only"):
        schedule.eval(one, torch.randn(6, 1))
