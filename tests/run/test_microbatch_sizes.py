"""Inputs that belong together are cut together; microbatches that do not fit the trace raise an error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipeWarning, Replicate, Schedule1F1B, SplitPoint, TensorChunkSpec, pipeline
from pipecut.run.schedule import PipelineSchedule
from tests.support.models import WIDTH, chain_pipe, chain_problem, traced_stages
from tests.support.training import TIGHT, assert_same_gradients, gradients_of


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


def test_microbatches_of_the_size_that_was_traced() -> None:
    """A batch of it is one microbatch, twice as many samples are two, and no other number runs."""
    x = torch.randn(16, 4, 6)
    schedule = schedule_of(x[:8])
    assert schedule.eval(x[:8]).shape == (8, 4, 6)
    assert len(schedule.eval(x)) == 16
    with pytest.raises(InputError) as error:
        schedule.eval(x[:12])
    text = str(error.value)
    assert "12 samples cannot be cut into 2 microbatches of 8: the code of Fixed fixed the batch at " in text
    assert "test_microbatch_sizes.py" in text
    assert (
        "Pass from 8 to 16 samples, a multiple of 8; or, if the model runs with 6, call pipeline() with an exa" in text
    )
    assert "make the schedule with args_chunk_spec or kwargs_chunk_spec: TensorChunkSpec(dim), or Replicate()" in text


class Towers(nn.Module):
    """Two encoders whose samples meet in a product of all pairs, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(4, 5), nn.Linear(6, 5)

    def forward(self, text: Tensor, image: Tensor, contrast: bool = False) -> Tensor:
        scores = self.text(text) @ self.image(image).T
        labels = torch.arange(len(scores)) if contrast else torch.arange(scores.shape[0])
        return F.cross_entropy(scores, labels)


def towers_step(example: int, samples: int, microbatches: int, **options: Any) -> tuple[Towers, list[int]]:
    """Train Towers beside the uncut model, microbatch by microbatch; return it and the sizes of its microbatches."""
    torch.manual_seed(0)
    model = Towers().double()
    text, image = torch.randn(samples, 4).double(), torch.randn(samples, 6).double()
    split = {"image": SplitPoint.BEGINNING}
    pipe = pipeline(model, (text[:example], image[:example]), options, split_spec=split)
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], microbatches)
    losses: list[Tensor] = []
    schedule.step(text, image, losses=losses, **options)
    actual = gradients_of(model)
    model.zero_grad()
    parts = list(zip(text.tensor_split(len(losses)), image.tensor_split(len(losses)), strict=True))
    for rows, others in parts:
        (model(rows, others, **options) * len(rows) / samples).backward()
    assert_same_gradients(actual, gradients_of(model), TIGHT)
    return model, [len(rows) for rows, _ in parts]


def test_inputs_that_nothing_ties_are_cut_together() -> None:
    """An encoder's features and a decoder's ids, or text and pixels: a step refused to guess which is the batch."""
    with pytest.warns(PipeWarning, match="image is cut into microbatches together with the other inputs: there are 6"):
        assert towers_step(3, 6, 2)[1] == [3, 3]
    with pytest.warns(PipeWarning, match=r'dynamic=\{"image": \{0: "rows"\}\}, or give the schedule chunk specs'):
        assert towers_step(2, 5, 4)[1] == [2, 1, 1, 1]


@pytest.mark.filterwarnings("ignore::pipecut.PipeWarning")  # sizes that are fixed, fewer microbatches, rows not tied
def test_inputs_are_cut_together_where_the_code_fixed_the_number_of_one() -> None:
    """One encoder's rows were cut into single ones beside those of the other, which the trace has as three."""
    assert towers_step(3, 6, 2, contrast=True)[1] == [3, 3]
    assert towers_step(3, 3, 2, contrast=True)[1] == [3]
    with pytest.raises(InputError, match="4 samples cannot be cut into 2 microbatches of 3: the code of Towers fixed"):
        towers_step(3, 4, 2, contrast=True)
    assert towers_step(1, 4, 4, contrast=True)[1] == [1, 1, 1, 1]
    with pytest.raises(InputError, match="microbatches of exactly 1. Pass .*; or make a schedule with 5 microbatches"):
        towers_step(1, 5, 4, contrast=True)
    with pytest.raises(InputError, match="Pass from 2 to 4 samples, a multiple of 2; or, if the samples are"):
        towers_step(2, 5, 2, contrast=True)  # no example would let 5 samples make 2 microbatches of one size
    with pytest.raises(InputError, match="or, if the model runs with 2, call pipeline.. with an example of 2; or"):
        towers_step(3, 4, 2, contrast=True)
    assert towers_step(2, 4, 2, contrast=True)[1] == [2, 2]


class Remembering(nn.Module):
    """Fixes the rows of one input to those of a buffer, and ties the other to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(6, 4)
        self.register_buffer("state", torch.ones(4, 4))

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        hidden = self.first(x) + self.state
        return hidden.square().mean() * self.second(features).square().mean()


def test_an_input_that_state_fixed_is_not_left_whole_beside_one_that_is_cut() -> None:
    """Its 4 rows went to every microbatch, each with one row of the other input."""
    torch.manual_seed(0)
    model = Remembering().double()
    x, features = torch.randn(4, 4).double(), torch.randn(4, 6).double()
    pipe = pipeline(model, (x, features), split_spec={"second": SplitPoint.BEGINNING})
    schedule = Schedule1F1B(traced_stages(pipe), 4)
    with pytest.warns(PipeWarning) as caught:
        schedule.step(x, features)
    actual = gradients_of(model)
    model.zero_grad()
    model(x, features).backward()
    assert_same_gradients(actual, gradients_of(model), TIGHT)
    told = str(caught[0].message)
    assert "the step runs 1, and its ranks are idle for longer, for the code of Remembering fixed the batch at " in told
    assert "the trace holds for microbatches of exactly 4. If this is not the last batch of a data loader, " in told
    assert (
        "pass more samples, or make a schedule with fewer microbatches; or, if the model runs with 1, call "
        "pipeline() with an example of 1; or, if the samples are in another dim, make the schedule with args_chunk_spec"
    ) in told
    whole = Schedule1F1B(traced_stages(pipe), 4, args_chunk_spec=(Replicate(), TensorChunkSpec(0)))
    model.zero_grad()
    whole.step(x, features)  # each microbatch has all rows of one and one of the other, as it was told
    assert_same_gradients(gradients_of(model), actual, TIGHT)


class Branching(nn.Module):
    """A model that treats small batches in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) * 3 if x.shape[0] > 2 else self.first(x))
        return out


def test_a_call_that_fits_and_its_microbatches_do_not() -> None:
    x = torch.randn(8, 6)
    pipe = pipeline(Branching(), (x,), split_spec={"second": SplitPoint.BEGINNING})
    with pytest.raises(InputError) as error:
        Schedule1F1B(traced_stages(pipe), 4, F.mse_loss).step(x, target=x)
    text = str(error.value)
    assert (
        "microbatch 0 does not fit, with 2 of the 8 samples that the call has along dim 0, in 4 microbatches:" in text
    )
    assert "batch = 2: the model's code found batch > 2 in the example" in text
    assert "Pass another number of samples, or make a schedule with another number of microbatches; or, if" in text
    torch.testing.assert_close(Schedule1F1B(traced_stages(pipe), 2, F.mse_loss).eval(x), pipe(x).detach())


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
    assert torch.allclose(schedule.eval(one, other, scale=3.0), model(one, other, 3.0), atol=1e-6)
    with pytest.raises(InputError, match="the trace holds for 4 only"):
        schedule.eval(one, torch.randn(6, 1))
