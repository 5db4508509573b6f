"""Nested values of tensors: their parts, copies of them, and whether two are the same."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


def assert_same(actual: Any, expected: Any, where: str, rtol: float = 0.0) -> None:
    """Two nested values of the same types with the same leaves; NaN is the same as NaN."""
    assert type(actual) is type(expected), f"{where} is a {type(actual)} and should be a {type(expected)}"
    if isinstance(expected, Tensor):
        assert actual.requires_grad == expected.requires_grad, f"{where} has requires_grad {actual.requires_grad}"
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda message: f"{where}: {message}"
        )
        return
    actual_parts, expected_parts = parts_of(actual), parts_of(expected)
    if expected_parts is None or actual_parts is None:
        assert actual == expected, f"{where} is {actual!r} and should be {expected!r}"
        return
    assert list(actual_parts) == list(expected_parts), f"{where} has {list(actual_parts)}, not {list(expected_parts)}"
    for key, part in expected_parts.items():
        assert_same(actual_parts[key], part, f"{where}[{key!r}]", rtol)


def parts_of(value: Any) -> dict[Any, Any] | None:
    """The members of a container by key; None for a leaf."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in (parts_of(value) or {}).values() for tensor in tensors_in(part)]


def fresh(call: Call) -> Call:
    """The same arguments with tensors of their own, so that one run's gradients and writes do not reach another."""
    memo = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_in(call)}
    return copy.deepcopy(call, memo)
