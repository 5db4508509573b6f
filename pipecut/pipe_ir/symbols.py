"""From torch's symbolic sizes to sympy expressions in the user's own words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from .spec import Dim, TensorSpec

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Symbols:
    """The symbolic dims of a trace's inputs, each under a readable name."""

    def __init__(self, inputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}
        self.origin: dict[sympy.Symbol, tuple[int, int]] = {}
        for position, (name, tensor) in enumerate(inputs):
            for dim, size in enumerate(tensor.shape):
                expr = _expr(size)
                if isinstance(expr, sympy.Symbol) and expr not in self._renamed:
                    self._renamed[expr] = self._fresh(name, dim)
                    self.origin[self._renamed[expr]] = (position, dim)

    def _fresh(self, name: str, dim: int) -> sympy.Symbol:
        taken = {str(symbol) for symbol in self.origin}
        plain = re.sub(r"\W+", "_", name).strip("_")
        wish = "batch" if dim == 0 and "batch" not in taken else f"{plain}_dim{dim}"
        while wish in taken:
            wish += "_"
        return sympy.Symbol(wish, integer=True, positive=True)

    def number(self, value: Any) -> sympy.Basic | int | None:
        """A symbolic number as an expression of the dims; None when it depends on data."""
        expr = _expr(value)
        return expr if isinstance(expr, int) else self.renamed(expr)

    def renamed(self, expr: sympy.Basic) -> sympy.Basic | None:
        """An expression in the names of the dims; None when it depends on data."""
        if not expr.free_symbols <= self._renamed.keys():
            return None
        renamed: sympy.Basic = expr.xreplace(self._renamed)
        return renamed

    def spec(self, tensor: torch.Tensor, requires_grad: bool) -> TensorSpec:
        """The spec of a traced tensor."""
        strided = tensor.layout == torch.strided
        stride = tuple(map(self._dim, tensor.stride())) if strided else ()
        return TensorSpec(tuple(map(self._dim, tensor.shape)), tensor.dtype, stride, requires_grad)

    def _dim(self, size: Any) -> Dim:
        expr = _expr(size)
        return expr if isinstance(expr, int) else expr.xreplace(self._renamed)


def _expr(value: Any) -> Any:
    if not isinstance(value, SYMBOLIC):
        return value
    expr = value.node.expr
    return int(expr) if isinstance(expr, sympy.Integer) else expr


def sizes_of(dims: Mapping[sympy.Symbol, tuple[int, int]], tensors: Mapping[int, torch.Tensor]) -> dict[str, int]:
    """What the symbolic dims are in a call with these tensors."""
    return {str(symbol): tensors[step].shape[dim] for symbol, (step, dim) in dims.items() if step in tensors}
