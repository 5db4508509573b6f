"""Blocks that take derivatives, or reach for the data of a tensor, stay whole: the model is cut around them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeWarning, PlannedSchedule, SplitError, SplitPoint, TraceError, pipe_split, pipeline
from pipecut.schedule import plan_for
from tests.support.training import Problem, assert_trains_as_uncut

Run = Callable[[nn.Linear, Tensor], Tensor]


def with_data(inner: nn.Linear, x: Tensor) -> Tensor:
    return inner(x) * x.data  # type: ignore[no-any-return]


def with_clamped_weight(inner: nn.Linear, x: Tensor) -> Tensor:
    inner.weight.data.clamp_(-0.2, 0.2)
    return inner(x)  # type: ignore[no-any-return]


def with_autograd(inner: nn.Linear, x: Tensor) -> Tensor:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner(point).tanh().sum(), point, create_graph=True)
    return x + slope


def with_autograd_of_nothing_saved(inner: nn.Linear, x: Tensor) -> Tensor:
    """Every operation is known to the tracer, but not that the backward ran without gradients of its own."""
    (slope,) = torch.autograd.grad((inner(x) * 2).sum(), x)
    return inner(x) * slope  # type: ignore[no-any-return]


def with_func(inner: nn.Linear, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda point: inner(point).tanh().sum())(x)  # type: ignore[no-any-return]


def with_jvp(inner: nn.Linear, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda point: inner(point).tanh(), (x,), (torch.ones_like(x),))[1]  # type: ignore[no-any-return]


BLOCKS: list[Any] = [
    with_data,
    with_func,
    *(
        pytest.param(run, marks=pytest.mark.slow)
        for run in (with_clamped_weight, with_autograd_of_nothing_saved, with_autograd, with_jvp)
    ),
]


class Block(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.inner, self.out = run, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.run(self.inner, x))  # type: ignore[no-any-return]


def model_of(run: Run) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(run), Block(run), nn.Linear(4, 4)).double()


X = torch.randn(4, 4, dtype=torch.double)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, for jvp
@pytest.mark.parametrize("run", BLOCKS, ids=lambda run: run.__name__)
def test_the_model_is_cut_around_them(run: Run) -> None:
    """`p.data.clamp_()` in the run on the example wrote to the user's own weights."""
    model = model_of(run)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(PipeWarning, match=r"'1' \(Block\): it .*\n.*'2' \(Block\): it"):
        pipe = pipeline(model, (X,), num_stages=2)
    assert [item.path for item in pipe.traced.fallbacks] == ["1", "2"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    problem = Problem(
        model, (torch.randn(6, 4, dtype=torch.double),), torch.randn(6, 4).double(), nn.functional.mse_loss
    )
    for name in ("1F1B", "ZB-H1"):
        plan = plan_for(name, ranks=2, microbatches=2)
        stages = [pipe.build_stage(index, "cpu") for index in range(2)]
        assert_trains_as_uncut(PlannedSchedule(stages, plan, nn.functional.mse_loss), problem)


class Alone(nn.Module):
    """A block without modules of its own, whose last operation is on x.data."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.data.mean()


@pytest.mark.filterwarnings("ignore:.*stay as they are")
def test_a_block_without_modules_of_its_own() -> None:
    """It was said to be the model's own forward, between its modules."""
    model = nn.Sequential(nn.Linear(4, 4), Alone(), nn.Linear(4, 4)).double()
    pipe = pipeline(model, (X,), num_stages=2)
    assert [item.path for item in pipe.traced.fallbacks] == ["1"]
    torch.testing.assert_close(pipe(X), model(X))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        pytest.param(
            with_data,
            "it uses a tensor that comes from no operation, such as x.data, at .*: return self.out(",
            marks=pytest.mark.slow,
        ),
        (with_autograd, "it computes derivatives in its forward, .* at .*torch.autograd.grad("),
    ],
)
def test_a_cut_inside_says_where_to_cut(run: Run, reason: str) -> None:
    model, pattern = model_of(run), re.escape(reason).replace(r"\.\*", ".*")
    with pytest.raises(SplitError, match=f"'1.out', inside '1', .*{pattern}.*cut before or after '1'"):
        pipeline(model, (X,), split_spec={"1.out": SplitPoint.BEGINNING}, tracer="fx")
    assert pipeline(model, (X,), split_spec={"1": SplitPoint.END}, tracer="fx").num_stages == 2


class Root(nn.Module):
    """Does in its own forward, between its modules, what cannot be traced."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.inner, self.out = run, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.inner, x)
        pipe_split()
        return self.out(x)  # type: ignore[no-any-return]


REMEDIES: dict[Run, tuple[str, Run]] = {
    with_data: (r"use x.detach\(\) in place of x.data", lambda inner, x: inner(x) * x.detach()),
    with_clamped_weight: (
        r"write to parameters as they are, under torch.no_grad\(\)",
        lambda inner, x: clamped(inner, x),
    ),
    with_autograd: (
        "move these lines into a module of their own",
        lambda inner, x: Block(with_autograd).to(x.dtype)(x),
    ),
}


def clamped(inner: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        inner.weight.clamp_(-0.2, 0.2)
    return inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", REMEDIES, ids=lambda run: run.__name__)
def test_in_the_models_own_forward_the_error_has_a_remedy_that_works(run: Run) -> None:
    remedy, mended = REMEDIES[run]
    for tracer in ("auto", "export"):
        with pytest.raises(TraceError, match=remedy):
            pipeline(Root(run).double(), (X,), tracer=tracer)  # type: ignore[arg-type]
    if run is with_autograd:  # as a module of the model
        return
    model = Root(mended).double()
    torch.testing.assert_close(pipeline(model, (X,))(X), model(X))
