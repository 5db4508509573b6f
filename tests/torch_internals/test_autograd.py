"""Autograd's engine, the values that its nodes have saved, and its hooks are where pipecut looks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipecut.torch_internals import (
    WRITE_TO_LEAF,
    NodeKind,
    gradient_shape,
    has_gradient_hooks,
    hooks_registered,
    is_only_hook,
    is_packed,
    is_python_node,
    packing_hooks,
    profiler_is_on,
    run_backward,
    saved_value,
    sequence_number,
    tensor_hooks,
)


def node_of(tensor: Tensor) -> Any:
    return get_gradient_edge(tensor).node


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def test_the_engine_accumulates_or_collects() -> None:
    x, weight = leaf(2, 3), leaf(3, 4)
    run_backward([x @ weight], [torch.ones(2, 4)], [], accumulate=True)
    assert x.grad is not None
    assert weight.grad is not None
    before = x.grad.clone()
    (gradient,) = run_backward([get_gradient_edge(x @ weight)], [torch.ones(2, 4)], [x], accumulate=False)
    assert gradient is not None
    assert torch.equal(gradient, before)
    assert torch.equal(x.grad, before)


def test_unreachable_inputs_have_no_gradient() -> None:
    x, other = leaf(1), leaf(1)
    assert run_backward([x * 2], [torch.ones(1)], [other], accumulate=False) == (None,)


@pytest.mark.parametrize(
    ("operation", "names"),
    [
        (lambda x: x.mm(leaf(3, 3)), ["self", "mat2", "self_sym_sizes", "mat2_sym_sizes", "mat2_sym_strides"]),
        (
            lambda x: torch.addmm(leaf(3), x, leaf(3, 3)),
            ["mat1", "mat2", "alpha", "mat1_sym_sizes"],
        ),
        (lambda x: x[None].bmm(leaf(1, 3, 3)), ["self", "mat2"]),
        (
            lambda x: nn.functional.conv1d(x[None], leaf(1, 3, 1)),
            ["input", "weight", "bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding"],
        ),
        (
            lambda x: nn.functional.embedding(torch.tensor([0]), x),
            ["indices", "weight_sym_argsize_0", "padding_idx", "sparse", "scale_grad_by_freq"],
        ),
    ],
)
def test_saved_values_have_the_names_of_derivatives(operation: Any, names: list[str]) -> None:
    node = node_of(operation(leaf(3, 3)))
    for name in names:
        saved_value(node, name)
    assert gradient_shape(node)


def test_a_missing_padding_is_unsigned() -> None:
    node = node_of(nn.functional.embedding(torch.tensor([0]), leaf(2, 2)))
    assert saved_value(node, "padding_idx") in (-1, 2**64 - 1)


def test_tensors_that_hooks_have_packed_are_known() -> None:
    x = leaf(2, 2)
    plain = node_of(x.mm(leaf(2, 2)))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        packed = node_of(x.mm(leaf(2, 2)))
    assert (is_packed(plain, "mat2"), is_packed(packed, "mat2")) == (False, True)


def test_custom_functions_are_nodes_of_python() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    assert is_python_node(node_of(Same.apply(leaf(1))))
    assert not is_python_node(node_of(leaf(1) * 2))


def test_hooks_on_tensors_are_listed_and_counted() -> None:
    x, y, z = leaf(1), leaf(1), leaf(1)
    before = hooks_registered()
    handle = x.register_hook(print)
    y.register_post_accumulate_grad_hook(print)  # type: ignore[no-untyped-call]
    assert hooks_registered() == before + 2
    assert [*(tensor_hooks(x) or {})] == [handle.id]
    assert not tensor_hooks(z)
    assert [has_gradient_hooks(tensor) for tensor in (x, y, z)] == [True, True, False]
    handle.remove()
    assert not has_gradient_hooks(x)


def test_a_hook_knows_if_it_is_the_only_one() -> None:
    node = node_of(leaf(1) * 2)
    first = node.register_hook(print)
    assert is_only_hook(first)
    node.register_hook(print)
    assert not is_only_hook(first)


def test_a_profiler_that_is_on_is_seen() -> None:
    assert not profiler_is_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiler_is_on()
    assert not profiler_is_on()


def test_kinds_of_nodes_have_these_names() -> None:
    square, image = leaf(2, 2), leaf(1, 1, 4, 4)
    made = {
        NodeKind.ADDMM: torch.addmm(leaf(2), square, square),
        NodeKind.BMM: torch.bmm(leaf(1, 2, 2), leaf(1, 2, 2)),
        NodeKind.CONVOLUTION: nn.functional.conv2d(image, leaf(1, 1, 3, 3)),
        NodeKind.EMBEDDING: nn.functional.embedding(torch.tensor([0]), square),
        NodeKind.MM: square @ square,
        NodeKind.TRANSPOSE: square.t(),
        NodeKind.REENTRANT_CHECKPOINT: checkpoint(torch.sin, square, use_reentrant=True),
        NodeKind.ACCUMULATOR: square,
    }
    assert [type(node_of(tensor)).__name__ for tensor in made.values()] == [*made]


def test_a_write_to_a_leaf_is_told_in_these_words() -> None:
    for written in (leaf(2), leaf(2).view(2)):
        with pytest.raises(RuntimeError, match=WRITE_TO_LEAF):
            written.add_(1)


def test_the_innermost_hooks_on_saved_tensors_are_known() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    assert packing_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooks = packing_hooks()
        assert hooks is not None
        assert hooks[0] is pack
    assert packing_hooks() is None


def test_nodes_are_numbered_as_they_are_made() -> None:
    square = leaf(2, 2)
    first = square * 2
    second = first.t()
    numbers = [sequence_number(node_of(value)) for value in (first, second, square)]
    assert numbers[0] + 1 == numbers[1] < numbers[2]
