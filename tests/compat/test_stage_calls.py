"""A stage does one microbatch at a time under upstream's names, with the gradients of the uncut model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipecut.compat import _IR, PipelineStage, ScheduleGPipe, _utils
from pipecut.compat._backward import stage_backward, stage_backward_input, stage_backward_weight
from pipecut.compat.stage import _normalize_model_output_as_tuple, _PipelineStage


def two_stages() -> tuple[nn.Sequential, list[PipelineStage]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(model)]


@pytest.mark.parametrize("full", [True, False])
def test_two_stages_run_by_hand(full: bool) -> None:
    model, (first, last) = two_stages()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    output = first.forward_one_chunk(0, (x,))
    last.set_local_fwd_input(output, 0)
    loss = nn.functional.mse_loss(last.forward_one_chunk(0, ()), y)
    assert (len(first.fwd_cache), len(last.output_chunks), len(first.output_chunks)) == (1, 1, 0)
    last.backward_one_chunk(0, loss=loss, full_backward=full)
    first.set_local_bwd_input(last.get_local_bwd_output(0), 0)
    first.backward_one_chunk(0, full_backward=full)
    if not full:
        assert all(parameter.grad is None for parameter in model.parameters())
        for stage in (first, last):
            stage.backward_weight_one_chunk(0, last_backward=True)
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
    assert not first.fwd_cache
    first.scale_grads(4)
    torch.testing.assert_close(first.submod.get_parameter("weight").grad, found["0.weight"] / 4)


def test_calls_out_of_order_are_assertion_errors() -> None:
    _, (first, last) = two_stages()
    with pytest.raises(AssertionError, match=r"without backward_one_chunk\(full_backward=False\) of that microbatch"):
        first.backward_weight_one_chunk(0)
    with pytest.raises(AssertionError, match="stage 1 has no input for microbatch 0: give it what the stage before"):
        last.forward_one_chunk(0, ())
    with pytest.raises(AssertionError, match=r"has no microbatch 0 in flight: call forward_one_chunk\(\) before"):
        last.backward_one_chunk(0)
    with pytest.raises(AssertionError, match="is for stages after the first"):
        first.set_local_fwd_input((), 0)
    with pytest.raises(AssertionError, match="is for stages after the first"):
        first.get_local_bwd_output(0)
    with pytest.raises(AssertionError, match="stage 1 has no gradients for microbatch 0"):
        last.get_local_bwd_output(0)
    with pytest.raises(AssertionError, match="is for stages before the last"):
        last.set_local_bwd_input((), 0)
    first.forward_one_chunk(0, (torch.ones(2, 4),))
    with pytest.raises(AssertionError, match="microbatch 0, needs the gradients of its outputs"):
        first.backward_one_chunk(0)
    first.clear_runtime_states()
    assert not first.fwd_cache


def test_attributes_of_a_stage() -> None:
    _, (first, _) = two_stages()
    assert (first.group_rank, first.group_size, first.has_backward, first._runtime_validate) == (0, 1, False, False)
    first._has_backward = True
    assert first.has_backward
    assert first.stage_index_to_group_rank == {0: 0, 1: 0}
    assert _normalize_model_output_as_tuple(1) == (1,)
    first.perform_reduce_grad(2)
    assert _PipelineStage.__mro__[1] is PipelineStage


def test_dw_builder_is_called_for_each_microbatch_with_full_backwards_too() -> None:
    built, ran = [], []

    def builder() -> Callable[[], None]:
        built.append(1)
        return lambda: ran.append(1)

    stage = PipelineStage(nn.Linear(4, 4), 0, 1, "cpu", dw_builder=builder)
    ScheduleGPipe(stage, 3, loss_fn=nn.functional.mse_loss).step(torch.ones(6, 4), target=torch.ones(6, 4))
    assert (len(built), len(ran)) == (3, 3)


def test_output_chunks_are_kept_if_outputs_are_asked_for() -> None:
    _, stages = two_stages()
    schedule = ScheduleGPipe(stages, 3, loss_fn=nn.functional.mse_loss)
    schedule.step(torch.ones(6, 4), target=torch.ones(6, 4))
    assert [len(stage.output_chunks) for stage in stages] == [0, 3]
    schedule.step(torch.ones(6, 4), target=torch.ones(6, 4), return_outputs=False)
    assert [len(stage.output_chunks) for stage in stages] == [0, 0]


def test_output_chunks_of_the_step_before_are_not_held_in_the_next() -> None:
    _, stages = two_stages()
    schedule = ScheduleGPipe(stages, 3)
    held: list[int] = []
    stages[0].submod.register_forward_hook(lambda *_: held.append(len(stages[1].output_chunks)))
    for _ in range(2):
        schedule.eval(torch.ones(6, 4))
        assert len(stages[1].output_chunks) == 3
    assert held == [0] * 6


def perceptron() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)


def test_backwards_by_upstreams_names() -> None:
    model, x = perceptron()
    whole = stage_backward(model(x), torch.ones(3, 4), [x])
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for times in (1, 2):  # what the input had is kept, as for parameters
        model.zero_grad()
        inputs, groups = stage_backward_input([model(x)], [torch.ones(3, 4)], [x], model.parameters())
        torch.testing.assert_close(inputs, whole)
        torch.testing.assert_close(x.grad, whole[0] * times)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert stage_backward_weight(model.parameters(), groups) == (None,) * 4  # what was there before
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    only = stage_backward((model(x), "text"), (torch.ones(3, 4), None), [x], outputs_with_grads_idxs=[0])
    torch.testing.assert_close(only, whole)


def nested(y: Tensor) -> dict[str, Any]:
    return {
        "tuple": (y, [y * 2, "text"], None),
        "mapping": {"one": y, "more": {"two": y.sin(), "number": 3}},
        "list of mappings": [{"one": y}, {"two": (y * y,)}],
    }


def gradients_like(value: Any) -> Any:
    return tree_map(lambda leaf: torch.full_like(leaf, 0.5) if isinstance(leaf, Tensor) else None, value)


@pytest.mark.parametrize("kind", ["tuple", "mapping", "list of mappings"])
@pytest.mark.parametrize("full", [True, False])
def test_nested_outputs_give_all_of_their_gradients(kind: str, full: bool) -> None:
    model, x = perceptron()
    output = nested(model(x))[kind]
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    sum((leaf * 0.5).sum() for leaf in leaves).backward()  # type: ignore[union-attr]
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    wanted_input, x.grad = x.grad, None
    model.zero_grad()
    output = nested(model(x))[kind]
    if full:
        found = stage_backward(output, gradients_like(output), (x,))
    else:
        found, groups = stage_backward_input(output, gradients_like(output), (x,), model.parameters())
        stage_backward_weight(model.parameters(), groups)
    torch.testing.assert_close(found[0], wanted_input)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


def test_entries_without_a_gradient_do_not_take_part() -> None:
    x, grad = torch.ones(2, requires_grad=True), torch.ones(2)
    y = x * 3
    assert stage_backward((y, [y.sum()]), (grad, None), (x,))[0].tolist() == [3, 3]  # type: ignore[union-attr]
    y = x * 3
    chosen = stage_backward((x * 5, [y, y]), (grad, [grad, None]), (x,), outputs_with_grads_idxs=[1])
    assert chosen[0].tolist() == [3, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrap", "grads", "told"),
    [
        (lambda y: (y, y), (None,), r"output is a list of 2, and its gradient is a tuple of 1: give one gradient"),
        (lambda y: {"a": y}, {"b": None}, r"output is a dict of 1, and its gradient is a dict of 1"),
        (lambda y: (y, [y]), (None, 7), r"output\[1\] is a list of 1, and its gradient is a int: give one"),
        (lambda y: (y, y), (None, 7), r"output\[1\] is a tensor, and its gradient is a int"),
    ],
)
def test_gradients_unlike_their_outputs_are_assertion_errors(wrap: Any, grads: Any, told: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(AssertionError, match=told):
        stage_backward(wrap(x * 2), grads, (x,))


@pytest.mark.parametrize(("factor", "some"), [(2.0, True), (1.0, False)])
def test_gradients_that_wait_may_be_overwritten(factor: float, some: bool) -> None:
    model, x = perceptron()
    model(x).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    for group in groups:
        group["grads"] = tuple((each[0] * factor if some else None, None) for each in group["grads"])
    stage_backward_weight(model.parameters(), groups)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        if some:
            torch.testing.assert_close(parameter.grad, gradient * factor)
        else:
            assert parameter.grad is None


def test_the_rest_of_a_backward_returns_the_gradients_that_were_there_before() -> None:
    """They were Nones, also from the second microbatch on."""
    model, x = perceptron()
    for _ in range(2):
        before = tuple(parameter.grad for parameter in model.parameters())
        _, groups = stage_backward_input([model(x)], [torch.ones(3, 4)], [x], model.parameters())
        returned = stage_backward_weight(model.parameters(), groups)
        assert all(one is other for one, other in zip(returned, before, strict=True))
    assert all(gradient is not None for gradient in before)


def test_pipe_info_is_one_class() -> None:
    assert _utils.PipeInfo is _IR.PipeInfo
