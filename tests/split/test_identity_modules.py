"""A module that returns its input untouched is called all the same, and its result is used, not its input."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, PipeWarning, SplitPoint, pipeline
from tests.support.equality import assert_equals_uncut, assert_same_run, run_apart, run_in_one_graph, run_uncut
from tests.support.nested_values import Call, fresh
from tests.support.sampling import sampled

X = torch.randn(16, 8)
CALL: Call = ((X,), {})
BEFORE_B = {"b": SplitPoint.BEGINNING}


class DropPath(nn.Module):
    """Drops whole rows in training mode, and returns its input itself otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full((x.shape[0], 1), 0.5)) * 2 if self.training else x


class Around(nn.Module):
    """Layers a, b and c, with a module that may return its input before c."""

    def __init__(self, same: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.same, self.c = nn.Linear(8, 8), nn.Linear(8, 8), same, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.same(self.b(self.a(x))))


class Apart(Around):
    """Goes on with what the module returned and with what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        y = self.same(x)
        return self.c(x * 3 + y)


class AcrossTheCut(Around):
    """The module's input and its result are used in the stage after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.same(x)
        return self.c(self.b(y)) + x


def assert_same_as(pipe: Pipe, uncut: nn.Module) -> None:
    """Outputs and gradients in both ways of running the stages."""
    for run in (run_in_one_graph, run_apart):
        expected = run_uncut(uncut, fresh(CALL), 0)
        tied = {name for tie in pipe.tied_parameters for name in tie.names} if run is run_apart else set()
        assert_same_run(run(pipe, fresh(CALL), 0), expected, run.__name__, tied)


def triple_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


def triple_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 3,)


def hook_after(module: nn.Module) -> None:
    module.register_forward_hook(triple_output)


def hook_before(module: nn.Module) -> None:
    module.register_forward_pre_hook(triple_input)


every_forward = pytest.mark.parametrize("cls", [Around, Apart, AcrossTheCut])
every_hook = pytest.mark.parametrize("put_hook", [hook_after, hook_before])


@every_forward
@every_hook
def test_a_hook_on_an_identity_changes_what_goes_on(put_hook: Callable[[nn.Module], None], cls: type[Around]) -> None:
    """Hooks are silent in the trace: the result was the input there, and stages went on with the input."""
    model = cls(nn.Identity())
    put_hook(model.same)
    uncut = copy.deepcopy(model)
    assert_same_as(pipeline(model, (X,), split_spec=BEFORE_B), uncut)


@every_forward
@every_hook
def test_a_hook_put_on_the_stage_later_changes_what_goes_on(
    put_hook: Callable[[nn.Module], None], cls: type[Around]
) -> None:
    model = cls(nn.Identity())
    uncut = copy.deepcopy(model)
    pipe = pipeline(model, (X,), split_spec=BEFORE_B)
    assert_same_as(pipe, uncut)
    put_hook(uncut.same)
    put_hook(pipe.get_stage_module(0 if cls is AcrossTheCut else 1).get_submodule("same"))
    assert_same_as(pipe, uncut)


@every_forward
@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_returns_its_input_in_one_mode_follows_the_other(cls: type[Around], training: bool) -> None:
    """Cut in evaluation mode, where DropPath does nothing, it did nothing after train() either."""
    model = cls(DropPath()).train(training)
    uncut = copy.deepcopy(model)
    pipe = pipeline(model, (X,), split_spec=BEFORE_B)
    for mode in (training, not training, training):
        pipe.train(mode)
        assert_same_as(pipe, uncut.train(mode))


@every_forward
@pytest.mark.parametrize(
    ("same", "training"),
    sampled(
        [(same, training) for same in (nn.Identity, DropPath, nn.Dropout) for training in (True, False)],
        lambda case: case in ((DropPath, True), (nn.Dropout, False)),
    ),
)
def test_models_with_such_modules_are_as_uncut(
    same: Callable[[], nn.Module], training: bool, cls: type[Around]
) -> None:
    assert_equals_uncut(cls(same()).train(training), (X,), split_spec=BEFORE_B, expect_stages=2)


def test_a_chain_of_modules_that_return_their_input_is_called_in_order() -> None:
    model = Around(nn.Sequential(nn.Identity(), DropPath(), nn.Identity())).eval()
    pipe = pipeline(model, (X,), split_spec=BEFORE_B)
    seen: list[str] = []
    for index, part in enumerate(pipe.get_stage_module(1).get_submodule("same")):
        part.register_forward_hook(lambda module, args, output, index=index: seen.append(f"{index}") or output + 1)
    assert torch.allclose(pipe(X), model.c(model.b(model.a(X)) + 3), atol=1e-6)
    assert seen == ["0", "1", "2"]


class Block(nn.Module):
    """Two layers, and an operation before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q(torch.relu(self.p(x))))


class CallsTwice(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


def plain(put: Callable[[nn.Module], None]) -> Block:
    block = Block()
    put(block)
    return block


def patched() -> Block:
    block = Block()
    block.forward = types.MethodType(lambda self, x: Block.forward(self, x) * 2, block)  # type: ignore[method-assign]
    return block


class Repeated(nn.Module):
    """Calls one block three times."""

    def __init__(self, k: nn.Module) -> None:
        super().__init__()
        self.k, self.z = k, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.z(self.k(self.k(self.k(x)) + 1))


@pytest.mark.parametrize("path", sampled(["k.q", "k.q#1", "k.q#2"], lambda path: path == "k.q#1"))
@pytest.mark.parametrize(
    "make",
    [Block, lambda: plain(hook_after), lambda: plain(hook_before), CallsTwice, patched],
    ids=["plain", "hook", "pre-hook", "call", "patched forward"],
)
def test_a_module_that_runs_whole_and_in_pieces_in_one_stage_is_as_uncut(make: Callable[[], Block], path: str) -> None:
    """The stage has one object for both: what wraps its calls was lost for the whole ones, or came twice."""
    model = Repeated(make())
    uncut = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipeWarning)
        pipe = pipeline(model, (X,), split_spec={path: SplitPoint.BEGINNING})
    assert_same_as(pipe, uncut)
