"""TensorSpec: description of a tensor before it exists, with symbolic dims."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy
import torch

from ..errors import SpecError
from ..text import dtype_name, shape_text

Dim: TypeAlias = sympy.Expr | int
_Sizes = Mapping[str, int]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, layout and requires_grad of a tensor.

    >>> batch = sympy.Symbol("batch", integer=True, positive=True)
    >>> spec = TensorSpec((batch, 4), torch.float32, (4, 1), requires_grad=True)
    >>> print(spec)
    float32[batch, 4] grad
    >>> spec.bind({"batch": 3}).shape
    (3, 4)
    >>> spec.diff(TensorSpec((batch, 8), torch.float16, (8, 1)))
    ['dim 1 is 4 here and 8 there', 'dtype is float32 here and float16 there', 'needs a gradient here and not there']
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    stride: tuple[Dim, ...]
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), tensor.requires_grad)

    @functools.cached_property
    def nbytes(self) -> Dim:
        """Bytes of the tensor, as an expression of the symbolic dims."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """Symbolic dims that the shape depends on."""
        exprs = [dim for dim in self.shape if isinstance(dim, sympy.Expr)]
        return frozenset(symbol for expr in exprs for symbol in expr.free_symbols)

    @property
    def is_contiguous(self) -> bool:
        """True if the tensor lies in memory in the order of its dims, without gaps."""
        expected: Dim = 1
        if 0 in self.shape:
            return True
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size == 1:
                continue
            if sympy.expand(stride - expected) != 0:
                return False
            expected = expected * size
        return True

    def contiguous(self) -> TensorSpec:
        """Return the spec of the same tensor laid out in the order of its dims."""
        stride: list[Dim] = []
        step: Dim = 1
        for size in reversed(self.shape):
            stride.insert(0, step)
            step = step * (max(size, 1) if isinstance(size, int) else size)
        return replace(self, stride=tuple(stride))

    def permuted(self, order: Sequence[int]) -> TensorSpec:
        """Return the spec of `tensor.permute(order)`."""
        return replace(
            self, shape=tuple(self.shape[dim] for dim in order), stride=tuple(self.stride[dim] for dim in order)
        )

    def memory_order(self, sizes: _Sizes) -> tuple[int, ...] | None:
        """Return the order of dims in which the tensor lies in memory without gaps; None if there is none.

        It does not depend on sizes that are not given.
        """
        if not self.stride and self.shape:
            return None
        strides = [_concrete(stride, sizes, otherwise=2) for stride in self.stride]
        order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
        return order if self.permuted(order).is_contiguous else None

    def bind(self, sizes: _Sizes) -> TensorSpec:
        """Return a spec of concrete shapes: each symbolic dim gets its size by name."""
        symbols = {symbol for dim in (*self.shape, *self.stride) for symbol in sympy.sympify(dim).free_symbols}
        missing = sorted(str(symbol) for symbol in symbols if str(symbol) not in sizes)
        if missing:
            known = ", ".join(sorted(sizes)) or "none"
            raise SpecError(f"cannot bind {self}: no size given for {', '.join(missing)} (given: {known})")
        return replace(
            self,
            shape=tuple(_concrete(dim, sizes) for dim in self.shape),
            stride=tuple(_concrete(dim, sizes) for dim in self.stride),
        )

    def diff(self, other: TensorSpec) -> list[str]:
        """Return the differences between this spec ("here") and another one ("there") in words."""
        faults = []
        if len(self.shape) != len(other.shape):
            faults.append(
                f"has {len(self.shape)} dims here {shape_text(self.shape)} and {len(other.shape)} there "
                f"{shape_text(other.shape)}"
            )
        else:
            faults += [
                f"dim {index} is {mine} here and {theirs} there"
                for index, (mine, theirs) in enumerate(zip(self.shape, other.shape, strict=True))
                if mine != theirs
            ]
        if self.dtype != other.dtype:
            faults.append(f"dtype is {dtype_name(self.dtype)} here and {dtype_name(other.dtype)} there")
        if self.shape == other.shape and self.stride != other.stride:
            faults.append(f"strides are {shape_text(self.stride)} here and {shape_text(other.stride)} there")
        if self.requires_grad != other.requires_grad:
            words = ("needs a gradient", "not") if self.requires_grad else ("needs no gradient", "one")
            faults.append(f"{words[0]} here and {words[1]} there")
        return faults

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{shape_text(self.shape)}{' grad' if self.requires_grad else ''}"


def _concrete(dim: Dim, sizes: _Sizes, otherwise: int = 1) -> int:
    """Return a dim at these sizes; `otherwise` is the size of what they do not have."""
    if isinstance(dim, int):
        return dim
    return int(dim.subs({symbol: sizes.get(str(symbol), otherwise) for symbol in dim.free_symbols}))
