"""Hooks that users put on modules run as often as in the uncut model, and what they change stays changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, SplitPoint, pipeline
from pipecut.errors import PipeWarning, SplitError
from tests.support.equality import assert_same_run, run_apart, run_in_one_graph, run_uncut
from tests.support.nested_values import Call, fresh

BEGINNING = SplitPoint.BEGINNING


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def model() -> nn.Sequential:
    return nn.Sequential(block(), block(), block())


CALL: Call = ((torch.linspace(-1, 1, 24).view(3, 8),), {})


def assert_same_as(pipe: Pipe, uncut: nn.Module) -> None:
    """Outputs and gradients in both ways of running the stages."""
    for run in (run_in_one_graph, run_apart):
        reference = copy.deepcopy(uncut)
        assert_same_run(run(pipe, fresh(CALL), 0), run_uncut(reference, fresh(CALL), 0), run.__name__, set())


def double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def shift_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 1,)


def add_keyword_free(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    return output - args[0]


def put_hooks_on(module: nn.Module) -> None:
    module.register_forward_hook(double_output)
    module.register_forward_pre_hook(shift_input)
    module.register_forward_hook(add_keyword_free, with_kwargs=True, prepend=True)


@pytest.mark.parametrize("path", ["0", "1", "2", "1.0"])
def test_hooks_that_change_tensors_work_on_a_block(path: str) -> None:
    uncut = model()
    put_hooks_on(uncut.get_submodule(path))
    assert_same_as(pipeline(uncut, CALL[0], split_spec={"1": BEGINNING}), uncut)


def test_hooks_on_a_block_run_once_per_call() -> None:
    uncut, seen = model(), []
    uncut[1].register_forward_hook(lambda module, args, output: seen.append("after"))
    uncut[1].register_forward_pre_hook(lambda module, args: seen.append("before"))
    uncut[1].register_forward_hook(lambda module, args, output: seen.append("always"), always_call=True)
    pipe = pipeline(uncut, CALL[0], split_spec={"1": BEGINNING})
    assert seen == [], "hooks ran while the model was traced"
    pipe(*CALL[0])
    pipe(*CALL[0])
    assert seen == ["before", "after", "always"] * 2


def test_hooks_see_the_module_of_the_stage() -> None:
    uncut, seen = model(), []
    uncut[1][0].register_forward_hook(lambda module, args, output: seen.append(module))
    pipe = pipeline(uncut, CALL[0], split_spec={"1": BEGINNING})
    pipe(*CALL[0])
    assert seen == [pipe.stages[1][1][0]]


def test_hooks_that_change_tensors_work_on_a_module_that_is_cut() -> None:
    uncut = model()
    put_hooks_on(uncut[1])
    with pytest.warns(PipeWarning, match="'1' has a forward hook and is cut"):
        pipe = pipeline(uncut, CALL[0], split_spec={"1.1": BEGINNING})
    assert_same_as(pipe, uncut)


def test_hooks_that_change_tensors_work_on_the_model_itself() -> None:
    uncut = model()
    put_hooks_on(uncut)
    with pytest.warns(PipeWarning, match="has a forward hook and is cut"):
        pipe = pipeline(uncut, CALL[0], split_spec={"1": BEGINNING})
    assert_same_as(pipe, uncut)


def test_hooks_are_still_on_the_model_after_it_was_cut() -> None:
    uncut, seen = model(), []
    for module in (uncut, uncut[1]):
        module.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    with pytest.warns(PipeWarning):
        pipeline(uncut, CALL[0], split_spec={"1.1": BEGINNING})
    seen.clear()
    uncut(*CALL[0])
    assert len(seen) == 2


def triple_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor]:
    return (grad_input[0] * 3,)


def test_backward_hooks_work_on_a_block() -> None:
    uncut, seen = model(), []
    uncut[1].register_full_backward_hook(triple_gradient)
    uncut[1].register_full_backward_pre_hook(lambda module, grad_output: seen.append(len(grad_output)))
    pipe = pipeline(uncut, CALL[0], split_spec={"1": BEGINNING})
    assert_same_as(pipe, uncut)
    seen.clear()
    pipe(*CALL[0]).sum().backward()
    assert seen == [1]


def test_a_backward_hook_on_a_module_that_is_cut_is_refused() -> None:
    uncut = model()
    uncut[1].register_full_backward_hook(triple_gradient)
    with pytest.raises(SplitError, match="'1' has a backward hook and is cut"):
        pipeline(uncut, CALL[0], split_spec={"1.1": BEGINNING})


def test_a_hook_on_a_parameter_runs_in_backward() -> None:
    uncut = model()
    uncut[1][0].weight.register_hook(lambda gradient: gradient * 5)
    pipe = pipeline(uncut, CALL[0], split_spec={"1": BEGINNING})
    pipe(*CALL[0]).sum().backward()
    hooked = uncut[1][0].weight.grad.clone()
    uncut.zero_grad()
    uncut(*CALL[0]).sum().backward()
    assert torch.equal(hooked, uncut[1][0].weight.grad)


class WithItsOwnHook(nn.Module):
    """A module that hooks itself with a bound method, and keeps what the method sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[tuple[int, ...]] = []
        self.linear.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(tuple(output.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_bound_method_as_hook_belongs_to_the_stage() -> None:
    uncut = nn.Sequential(nn.Linear(8, 8), WithItsOwnHook())
    pipe = pipeline(uncut, CALL[0], split_spec={"1": BEGINNING})
    pipe(*CALL[0])
    assert (uncut[1].seen, pipe.stages[1][1].seen) == ([], [(3, 8)])
