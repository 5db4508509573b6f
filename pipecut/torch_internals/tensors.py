"""Tensors without memory, the identity and version of their memory, and sums of many at once."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

# Shapes, strides and dtypes without memory: the meta device has no stand-in for a tensor of another device.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# torch.overrides has the mode above autograd only; what an operator is made of is visible below it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The logger that prints a page for each operator that fake tensors do not support.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"

_T = TypeVar("_T", bound=Tensor)


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors have in common if and only if they share memory.

    `data_ptr()` is 0 for tensors without memory, and the same for an empty tensor and its neighbour.
    """
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """Return the number of times that a tensor was changed in place."""
    return tensor._version


def make_subclass(cls: type[_T], data: Tensor, requires_grad: bool) -> _T:
    """Return a tensor of a class over the memory of another; no `__init__` or `__new__` of the class runs.

    `Tensor.as_subclass` keeps the gradient history and cannot make a leaf that requires a gradient.
    """
    return Tensor._make_subclass(cls, data, requires_grad)


def add_each_(sums: list[Tensor], terms: list[Tensor]) -> None:
    """Add to each tensor its term, in place, with few kernels; there is no public form of this."""
    torch._foreach_add_(sums, terms)
