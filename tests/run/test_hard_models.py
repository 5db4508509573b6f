"""Models with what is hard to cut, trained in one process: each gives what it gives uncut."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt import GPT, GPTConfig, next_token_loss, random_tokens
from pipecut import Pipe, PlannedSchedule, TensorChunkSpec, get_schedule_class, pipe_split, pipeline
from pipecut.schedule import Plan, plan_for
from tests.split.test_models_outputs import Frozen, Packs, Pair, Result
from tests.split.test_models_skips import LateInputs, ThreeUsers, UNet
from tests.support.models import WIDTH, chain_problem, stages_of_chain, traced_stages
from tests.support.nested_values import tensors_in
from tests.support.sampling import sampled
from tests.support.training import (
    Problem,
    assert_evaluates_as_uncut,
    assert_same_gradients,
    assert_trains_as_uncut,
    gradients_of,
)

SPLIT_BACKWARD = ("1F1B", "ZB-H1")  # one with full backwards, one with input and weight gradients apart


def doubles(*shape: int, needs_gradient: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(needs_gradient)


def loss_of_everything(output: Any, target: Tensor) -> Tensor:
    """The mean over samples of all outputs, each element with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for place, tensor in enumerate(tensors_in(output)):
        weights = torch.linspace(0.5, 1.5 + place, tensor[0].numel(), dtype=torch.float64)
        total = total + ((tensor.flatten(1) * weights).sum(1) * target).mean()
    return total


def cut_at_marks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Pipe, Problem]:
    """A model with marks in it, in double precision, and a batch of the size of the example."""
    model = model.double()
    samples = tensors_in((args, kwargs))[0].shape[0]
    return pipeline(model, args, kwargs), Problem(model, args, doubles(samples), loss_of_everything, kwargs or {})


def check(pipe: Pipe, problem: Problem, schedules: tuple[str, ...] = SPLIT_BACKWARD, microbatches: int = 3) -> None:
    for name in schedules:
        schedule = get_schedule_class(name)(traced_stages(pipe), microbatches, problem.loss_fn)  # type: ignore[arg-type]
        assert_trains_as_uncut(schedule, problem, times=2)
        assert_evaluates_as_uncut(schedule, problem)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_skips_over_several_stages(needs_gradient: bool) -> None:
    check(*cut_at_marks(UNet(), (doubles(5, 2, 4, 4, needs_gradient=needs_gradient),)))


def test_skips_between_stages_of_one_rank_and_of_several() -> None:
    pipe, problem = cut_at_marks(UNet(), (doubles(5, 2, 4, 4, needs_gradient=True),))
    for placement in ([0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [1, 0, 2, 0, 1], [0, 1, 2, 1, 0]):
        rows: dict[int, list[str]] = {rank: [] for rank in placement}
        for step in ("F", "I", "W"):
            for stage, rank in enumerate(placement) if step == "F" else reversed(list(enumerate(placement))):
                rows[rank] += [f"{stage}{step}{microbatch}" for microbatch in range(3)]
        schedule = PlannedSchedule(traced_stages(pipe), Plan.from_actions(rows), problem.loss_fn)
        assert_trains_as_uncut(schedule, problem, times=2)


def test_a_value_with_three_users() -> None:
    check(*cut_at_marks(ThreeUsers(), (doubles(5, 8, needs_gradient=True),)))


@pytest.mark.parametrize("gradients", [(False, True, True), (True, False, True), (False, False, False)])
def test_inputs_of_later_stages_get_their_gradients(gradients: tuple[bool, ...]) -> None:
    check(*cut_at_marks(LateInputs(), tuple(doubles(5, 8, needs_gradient=grad) for grad in gradients)))


class TwoTowers(nn.Module):
    """The second stage uses nothing of the first, but an input of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.a(x)
        pipe_split()
        right = self.b(y)
        pipe_split()
        return self.c(left * right)


@pytest.mark.parametrize(
    "rows",
    [
        {0: ["0F0", "2F0", "2B0", "0B0"], 1: ["1F0", "1B0"]},
        {0: ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]},
        {0: ["0F0", "0B0"], 1: ["1F0", "2F0", "2I0", "1I0", "2W0", "1W0"]},
        {0: ["1F0", "1B0"], 1: ["0F0", "2F0", "2B0", "0B0"]},
    ],
)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_stage_that_uses_inputs_of_the_model_only(rows: dict[int, list[str]], needs_gradient: bool) -> None:
    inputs = (doubles(3, 8, needs_gradient=needs_gradient), doubles(3, 8, needs_gradient=needs_gradient))
    pipe, problem = cut_at_marks(TwoTowers(), inputs)
    plan = Plan.from_actions(rows)
    assert_trains_as_uncut(PlannedSchedule(traced_stages(pipe), plan, problem.loss_fn), problem)


@pytest.mark.parametrize(
    "rows",
    [
        {0: ["1F0", "0F0", "2F0", "2B0", "0B0", "1B0"]},
        {0: ["0F0", "2F0", "2B0", "0B0"], 1: ["1F0", "1B0"]},
        {0: ["1F0", "2F0", "2B0", "1B0"], 1: ["0F0", "0B0"]},
    ],
)
def test_a_stage_that_runs_before_the_first(rows: dict[int, list[str]]) -> None:
    pipe, problem = cut_at_marks(TwoTowers(), (doubles(3, 8), doubles(3, 8)))
    schedule = PlannedSchedule(traced_stages(pipe), Plan.from_actions(rows), problem.loss_fn)
    assert_trains_as_uncut(schedule, problem)


def test_an_input_that_was_computed() -> None:
    problem = chain_problem(3, samples=7)
    (x,), target = problem.args, problem.target
    before = nn.Linear(WIDTH, WIDTH).double()
    problem.loss_fn(problem.model(before(x).exp()), target).backward()
    expected = gradients_of(before)
    before.zero_grad(set_to_none=True)
    schedule = PlannedSchedule(
        stages_of_chain(problem.model), plan_for("1F1B", ranks=3, microbatches=4), problem.loss_fn
    )
    schedule.step(before(x).exp(), target=target)
    assert_same_gradients(gradients_of(before), expected, 1e-10)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "frozen dataclass", "namedtuple with None", "list"])
def test_outputs_keep_their_structure(kind: str) -> None:
    pipe, problem = cut_at_marks(Packs(kind), (doubles(7, 8),))
    schedule = get_schedule_class("1F1B")(traced_stages(pipe), 3, problem.loss_fn)  # type: ignore[arg-type]
    output = assert_trains_as_uncut(schedule, problem).output
    assert isinstance(output, (dict, list, Result, Frozen, Pair))
    assert_evaluates_as_uncut(schedule, problem)


class Averages(nn.Module):
    """Returns numbers besides its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        x = self.a(x)
        pipe_split()
        x = self.b(x)
        return x, x.square().mean(), 7


def test_numbers_among_the_outputs_are_averaged_over_the_samples() -> None:
    model = Averages().double()
    x, y = doubles(5, 8), doubles(5, 8)

    def loss_fn(output: tuple[Tensor, Tensor, int], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + 0.1 * output[1]

    pipe = pipeline(model, (x,))
    schedule = get_schedule_class("1F1B")(traced_stages(pipe), 3, loss_fn)  # type: ignore[arg-type]
    assert_trains_as_uncut(schedule, Problem(model, (x,), y, loss_fn))


@dataclass
class Labels:
    """A target with parts: several rows to a sample in one of them."""

    rows: Tensor
    weights: dict[str, Tensor]
    power: int


def test_targets_with_structure() -> None:
    problem = chain_problem(2, samples=5)

    def loss_fn(output: Tensor, target: Labels) -> Tensor:
        error = (output.flatten() - target.rows).abs() ** target.power
        return (error.view(output.shape).mean(1) * target.weights["each"]).mean() * target.weights["all"]

    target = Labels(problem.target.flatten(), {"each": doubles(5), "all": doubles()}, power=2)
    problem = Problem(problem.model, problem.args, target, loss_fn)
    spec = {"rows": TensorChunkSpec(0)}
    schedule = get_schedule_class("ZB-H1")(  # type: ignore[arg-type]
        stages_of_chain(problem.model), 3, loss_fn, target_chunk_spec=spec
    )
    assert_trains_as_uncut(schedule, problem)


class Keywords(nn.Module):
    """Takes nested keywords; some are used late, some need a gradient, some hold for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, options: dict[str, Tensor], table: Tensor, power: int = 2) -> Tensor:
        x = self.a(x) + table
        pipe_split()
        return self.b(x) * options["scale"] * options["keep"] + table**power


def test_keywords() -> None:
    keep = torch.rand(5, 8) < 0.5
    options = {"scale": doubles(5, 8, needs_gradient=True), "keep": keep}
    kwargs = {"options": options, "table": doubles(8, needs_gradient=True)}
    check(*cut_at_marks(Keywords(), (doubles(5, 8),), kwargs))


def test_keywords_of_stages_cut_by_hand() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)) * scale

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Scaled(), Scaled()

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.b(self.a(x, scale=scale), scale=scale)

    model = Both().double()
    problem = Problem(model, (doubles(5, 8),), doubles(5, 8), F.mse_loss, {"scale": doubles(5, 8, needs_gradient=True)})
    for name in SPLIT_BACKWARD:
        schedule = get_schedule_class(name)(stages_of_chain(model), 3, F.mse_loss)  # type: ignore[arg-type]
        assert_trains_as_uncut(schedule, problem, times=2)


def test_an_unused_output_and_one_without_gradient() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> list[Tensor]:
            x = self.a(x)
            return [x, x * 2, x.argmax(1), x.detach(), x.sin()]

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(8, 8)

        def forward(self, x: Tensor, unused: Tensor, index: Tensor, start: Tensor, last: Tensor) -> Tensor:
            return self.b(x) * index[:, None] + start * last

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fork, self.join = Fork(), Join()

        def forward(self, x: Tensor) -> Tensor:
            return self.join(*self.fork(x))

    model = Whole().double()
    problem = Problem(model, (doubles(5, 8, needs_gradient=True),), doubles(5, 8), F.mse_loss)
    for name in SPLIT_BACKWARD:
        schedule = get_schedule_class(name)(stages_of_chain(model), 3, F.mse_loss)  # type: ignore[arg-type]
        assert_trains_as_uncut(schedule, problem, times=2)


@pytest.mark.parametrize(
    "name", sampled(["1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"], lambda name: name == "DualPipeV")
)
def test_a_gpt_with_tied_embeddings(name: str) -> None:
    config = GPTConfig(vocabulary=32, context=8, layers=4, heads=2, width=16, tied_embeddings=True)
    model = GPT(config).double()
    tokens = random_tokens(config, batch=6)
    pipe = pipeline(model, (tokens,), num_stages=4)
    problem = Problem(model, (tokens,), tokens, next_token_loss)
    ranks = 4 if name in SPLIT_BACKWARD else 2
    schedule = get_schedule_class(name)(traced_stages(pipe), 4, next_token_loss, ranks=ranks)  # type: ignore[arg-type]
    assert_trains_as_uncut(schedule, problem, times=2)
    assert_evaluates_as_uncut(schedule, Problem(model, (tokens[:5],), tokens[:5], next_token_loss))


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """oneDNN's kernels for bfloat16 do not run on every machine that says so."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.usefixtures("without_onednn")
def test_bfloat16_is_as_exact_as_the_uncut_model_in_microbatches() -> None:
    config = GPTConfig(vocabulary=32, context=8, layers=4, heads=2, width=16)
    model = GPT(config).bfloat16()
    tokens = random_tokens(config, batch=6)
    expected = copy.deepcopy(model)
    for part in tokens.chunk(3):
        (next_token_loss(expected(part), part) / 3).backward()
    pipe = pipeline(model, (tokens,), num_stages=4)
    for name in SPLIT_BACKWARD:
        model.zero_grad(set_to_none=True)
        schedule = get_schedule_class(name)(traced_stages(pipe), 3, next_token_loss)  # type: ignore[arg-type]
        output = schedule.step(tokens, target=tokens)
        assert output.dtype == torch.bfloat16
        assert_same_gradients(gradients_of(model), gradients_of(expected), 1e-2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.late = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu()
        pipe_split()
        return self.late(self.b(x))


@pytest.mark.parametrize("name", ["GPipe", *SPLIT_BACKWARD])
def test_batch_norm_sees_the_microbatches_one_after_the_other(name: str) -> None:
    model = Normed().double()
    x, y = doubles(9, 8), doubles(9, 8)
    pipe = pipeline(model, (x,))
    expected = copy.deepcopy(model)
    for part, target in zip(x.split([3, 2, 2, 2]), y.split([3, 2, 2, 2]), strict=True):
        (F.mse_loss(expected(part), target) * len(part) / 9).backward()
    schedule = get_schedule_class(name)(traced_stages(pipe), 4, F.mse_loss)  # type: ignore[arg-type]
    schedule.step(x, target=y)
    assert_same_gradients(gradients_of(model), gradients_of(expected), 1e-10)
    for stage in pipe.stages:
        for label, buffer in stage.named_buffers():
            torch.testing.assert_close(buffer, dict(expected.named_buffers())[label], rtol=1e-12, atol=1e-12)
    pipe.eval()
    assert_evaluates_as_uncut(schedule, Problem(expected.eval(), (x,), y, F.mse_loss))
