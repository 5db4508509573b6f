"""Temporary changes of torch reach what they are meant for, and are gone afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecut.torch_internals import (
    intercepted_checkpoints,
    intercepted_functions,
    parameters_prepared,
    replaced,
    sizes_of_one_traced,
    tensors_not_copied,
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int = 2) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


kept_by_the_user: Callable[..., Tensor] = Double.apply


def test_autograd_functions_kept_in_a_variable_are_intercepted() -> None:
    seen = []

    def on_apply(cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append((cls, args[1:], kwargs))
        return run(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with intercepted_functions(on_apply):
        kept_by_the_user(x, 3).sum().backward()
    kept_by_the_user(x)
    assert seen == [(Double, (3,), {})]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_interceptions_nest() -> None:
    seen = []

    def outer(cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append("outer")
        return run(*args, **kwargs)

    def inner(cls: type, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen.append("inner")
        return run(*args, **kwargs)

    with intercepted_functions(outer):
        with intercepted_functions(inner):
            kept_by_the_user(torch.ones(1))
        kept_by_the_user(torch.ones(1))
    assert seen == ["inner", "outer", "outer"]


def test_non_reentrant_checkpoints_are_intercepted() -> None:
    seen = []

    def on_checkpoint(args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        seen.append((len(args), options["use_reentrant"], options["preserve_rng_state"], options["determinism_check"]))
        yield
        seen.append("done")

    x = torch.ones(1, requires_grad=True)
    with intercepted_checkpoints(on_checkpoint):
        checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=False)
    checkpoint(torch.sin, x, use_reentrant=False)
    assert seen == [(1, False, False, "default"), "done"]


def test_deepcopy_keeps_tensors_inside_the_block_only() -> None:
    value = {"plain": torch.ones(1), "parameter": nn.Parameter(torch.ones(1))}
    with tensors_not_copied():
        same = copy.deepcopy(value)
    other = copy.deepcopy(value)
    assert all(same[name] is value[name] for name in value)
    assert all(other[name] is not value[name] for name in value)


def test_parameters_are_prepared_before_they_are_registered() -> None:
    shapes: list[list[int]] = []
    with parameters_prepared(lambda parameter: shapes.append(list(parameter.shape))):
        nn.Linear(2, 3)
        nn.Linear(2, 3, bias=False)
    nn.Linear(1, 1)
    assert shapes == [[3, 2], [3], [3, 2]]


def test_a_replaced_attribute_is_back_after_an_error() -> None:
    class Base:
        value = 1

    class Derived(Base):
        pass

    def fail() -> None:
        with replaced(Derived, "value", 2):
            assert Derived.value == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "value" not in vars(Derived)
    assert Derived.value == 1


def test_a_size_of_one_stays_symbolic() -> None:
    dims = {"input": {0: torch.export.Dim.AUTO}}
    with sizes_of_one_traced():
        exported = torch.export.export(nn.ReLU(), (torch.ones(1, 2),), dynamic_shapes=dims, strict=False)
    (size, _) = next(node for node in exported.graph.nodes if node.op == "placeholder").meta["val"].shape
    assert isinstance(size, torch.SymInt)
