"""torch.compile and torch.cond inside a model that is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split, pipeline
from pipecut.errors import SplitError
from tests.support.equality import assert_equals_uncut, assert_same_forward, assert_same_runs, copied
from tests.support.nested_values import assert_same
from tests.support.sampling import sampled

BEGINNING = SplitPoint.BEGINNING


def test_a_compiled_submodule_stays_compiled() -> None:
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        def run(*args: Tensor) -> object:
            runs.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(block, backend=backend), nn.Linear(8, 2))
    x = torch.randn(3, 8)
    pipe = pipeline(model, (x,), split_spec={"1": BEGINNING})
    assert {name for stage in pipe.stages for name in stage.state_dict()} == set(model.state_dict())
    assert_same(pipe(x), model(x), "output")
    runs.clear()
    pipe(x)
    assert runs, "the compiled block ran uncompiled"


def test_a_module_compiled_in_place_is_cut_inside() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
    model[1].compile(backend="eager")
    x = torch.randn(3, 8)
    for path in ("1", "1.1"):
        assert_same(pipeline(model, (x,), split_spec={path: BEGINNING})(x), model(x), path)


def test_a_stage_is_compiled() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
    x = torch.randn(3, 8)
    pipe = pipeline(model, (x,), split_spec={"1.1": BEGINNING})
    first, second = (torch.compile(stage, backend="eager", fullgraph=True) for stage in pipe.stages)
    assert_same(second(first(x)), model(x), "output")


class Choosing(nn.Module):
    """Which of two layers runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.left(x), lambda x: self.right(x).sin(), (x,))


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_inside_a_block(sign: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Choosing(), nn.Linear(8, 2))
    call = ((sign * torch.rand(3, 8),), {})
    pipe = pipeline(copied(model), call[0], split_spec={"1": BEGINNING})
    assert_same_runs(pipe, copied(model), call, 0, "kept modules")
    assert_same_forward(pipe, copied(model), ((-sign * torch.rand(5, 8),), {}), 0, "kept modules")


def test_cond_over_parameters_in_the_cut_forward_is_refused() -> None:
    with pytest.raises(SplitError, match=r"torch\.cond uses parameters .* in a forward that is cut .*line \d+"):
        pipeline(Choosing(), (torch.rand(3, 8),))


class ChoosesInTheCutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        choice = x.sum() > 0
        pipe_split()
        x = torch.cond(choice, torch.sin, lambda x: x.cos() * 2, (x,))
        return self.b(x)


@pytest.mark.slow
@pytest.mark.parametrize("sign", sampled([1.0, -1.0], lambda sign: sign > 0))
def test_cond_in_the_cut_forward(sign: float) -> None:
    others = [((sign * torch.rand(4, 8),), {}), ((-sign * torch.rand(4, 8),), {})]
    assert_equals_uncut(ChoosesInTheCutForward(), (sign * torch.rand(3, 8),), expect_stages=2, other_calls=others)


def test_a_mark_inside_a_branch_is_refused() -> None:
    class Marked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def branch(x: Tensor) -> Tensor:
                pipe_split()
                return x.sin()

            return torch.cond(x.sum() > 0, branch, torch.cos, (x,))

    with pytest.raises(SplitError, match="inside a function passed to torch.cond"):
        pipeline(Marked(), (torch.randn(3, 8),))


@pytest.fixture
def _levels_closed() -> Iterator[None]:
    """A vmap that fails half way must not reach the tests that follow."""
    yield
    while torch._C._functorch.peek_interpreter_stack() is not None:
        torch._C._functorch._vmap_decrement_nesting()


@pytest.mark.usefixtures("_levels_closed")
def test_vmap_in_the_cut_forward() -> None:
    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.vmap(lambda row: row * row.sum())(self.a(x))
            pipe_split()
            return self.b(x)

    assert_equals_uncut(Batched(), (torch.randn(3, 8),), expect_stages=2)
