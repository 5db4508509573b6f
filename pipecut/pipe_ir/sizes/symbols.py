"""Symbolic sizes of a trace as sympy expressions with readable names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from ..spec import Dim, TensorSpec
from .dynamic import NOTHING_ASKED, DynamicDims, Place
from .equal import Decision, implied_equalities, related

_EMPTY: Mapping[sympy.Symbol, sympy.Basic] = {}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Symbols:
    """Symbolic dims of a trace's inputs, each under a readable name.

    `same` has the symbols that stand for the size of another one, or for a number. `asked` has the user's names for
    the dims of inputs, whose `shapes` are those of the example: dims of one name are one size. `decisions` on sizes
    may tie more of them. `origin` is an input's dim that has each size, `named` the sizes that the user named.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[str, torch.Tensor]],
        same: Mapping[sympy.Symbol, sympy.Basic] = _EMPTY,
        asked: DynamicDims = NOTHING_ASKED,
        shapes: Sequence[Sequence[int]] = (),
        decisions: Iterable[Decision] = (),
    ) -> None:
        names, decisions = asked.names, list(decisions)
        self._merged: dict[sympy.Symbol, sympy.Basic] = dict(same)
        self._renamed: dict[sympy.Symbol, sympy.Basic] = {}
        self.origin: dict[sympy.Symbol, Place] = {}
        places = {
            (position, dim): _expr(size)
            for position, (_, tensor) in enumerate(inputs)
            for dim, size in enumerate(tensor.shape)
        }
        self._merge_names(places, names)
        self._resolve_alike(places, asked, shapes, decisions)
        for one, other in implied_equalities(decisions, self._resolved):
            self._merge(one, other, places)
        wishes: dict[sympy.Basic, str] = {}
        for place, name in names.items():
            if isinstance(self._resolved(places[place]), sympy.Symbol):
                wishes.setdefault(self._resolved(places[place]), name)
        self.named = frozenset(wishes.values())
        for (position, dim), expr in places.items():
            symbol = self._resolved(expr)
            if isinstance(symbol, sympy.Symbol) and symbol not in self._renamed:
                name = wishes.get(symbol) or self._fresh(inputs[position][0], dim)
                self._renamed[symbol] = sympy.Symbol(name, integer=True, positive=True)
                self.origin[self._renamed[symbol]] = (position, dim)
        ends = {symbol: self._resolved(symbol) for symbol in self._merged}
        known = frozenset(self._renamed)
        self._renamed |= {
            symbol: end.xreplace(self._renamed) for symbol, end in ends.items() if end.free_symbols <= known
        }

    def _merge_names(self, places: Mapping[Place, Any], names: Mapping[Place, str]) -> None:
        """Give dims of one name one size: a number if one of them has become a number."""
        first: dict[str, sympy.Basic] = {}
        for place, name in names.items():
            mine, other = self._resolved(places[place]), self._resolved(first.setdefault(name, places[place]))
            if mine == other:
                continue
            if isinstance(mine, sympy.Symbol) and mine not in other.free_symbols:
                self._merged[mine] = other
            elif isinstance(other, sympy.Symbol) and other not in mine.free_symbols:
                self._merged[other] = mine

    def _resolve_alike(
        self,
        places: Mapping[Place, Any],
        asked: DynamicDims,
        shapes: Sequence[Sequence[int]],
        decisions: Sequence[Decision],
    ) -> None:
        """Tie dims without a name that are as large as a named one to that size, or to the number of the example."""
        alike = asked.alike(shapes)
        wanted = {self._resolved(expr) for place, expr in places.items() if place not in alike}
        for nth, dim in sorted(alike):
            symbol, size = self._resolved(places[nth, dim]), shapes[nth][dim]
            if isinstance(symbol, sympy.Symbol) and symbol not in wanted:
                # Not a size of the same input: a square tensor would be square for ever.
                named = [at for at in asked.names if at[0] != nth and shapes[at[0]][at[1]] == size]
                others = [self._resolved(places[at]) for at in named]
                self._merged[symbol] = related(symbol, others, decisions, self._resolved) or sympy.Integer(size)

    def _merge(self, one: sympy.Symbol, other: sympy.Symbol, places: Mapping[Place, Any]) -> None:
        """Merge two symbols that are one size: the one that the inputs have first stays."""
        order = [self._resolved(expr) for expr in places.values()]
        one, other = self._resolved(one), self._resolved(other)
        if one != other and one in order and other in order:
            first, second = sorted((one, other), key=order.index)
            self._merged[second] = first

    def _resolved(self, expr: Any) -> Any:
        """Return an expression without the symbols that were merged into others."""
        expr = sympy.sympify(expr)
        while expr.free_symbols & self._merged.keys():
            expr = expr.xreplace(self._merged)
        return expr

    def _fresh(self, name: str, dim: int) -> str:
        taken = {*map(str, self.origin), *self.named}
        plain = re.sub(r"\W+", "_", name).strip("_")
        wish = "batch" if dim == 0 and "batch" not in taken else f"{plain}_dim{dim}"
        while wish in taken:
            wish += "_"
        return wish

    def number(self, value: Any) -> sympy.Basic | int | None:
        """Return a symbolic number as an expression of the dims; None if it depends on data."""
        expr = _expr(value)
        return expr if isinstance(expr, int) else _plain(self.renamed(expr))

    def renamed(self, expr: sympy.Basic) -> sympy.Basic | None:
        """Return an expression in the names of the dims; None if it depends on data."""
        if not expr.free_symbols <= self._renamed.keys():
            return None
        renamed: sympy.Basic = expr.xreplace(self._renamed)
        return renamed

    def spec(self, tensor: torch.Tensor, requires_grad: bool) -> TensorSpec:
        """Return the spec of a traced tensor."""
        strided = tensor.layout == torch.strided
        stride = tuple(map(self._dim, tensor.stride())) if strided else ()
        return TensorSpec(tuple(map(self._dim, tensor.shape)), tensor.dtype, stride, requires_grad)

    def _dim(self, size: Any) -> Dim:
        expr = _expr(size)
        dim: Dim = expr if isinstance(expr, int) else _plain(expr.xreplace(self._renamed))
        return dim


def _expr(value: Any) -> Any:
    return _plain(value.node.expr) if isinstance(value, SYMBOLIC) else value


def _plain(expr: Any) -> Any:
    return int(expr) if isinstance(expr, sympy.Integer) else expr


def sizes_of(dims: Mapping[sympy.Symbol, tuple[int, int]], tensors: Mapping[int, torch.Tensor]) -> dict[str, int]:
    """Return the sizes of the symbolic dims in a call with these tensors."""
    return {str(symbol): tensors[value].shape[dim] for symbol, (value, dim) in dims.items() if value in tensors}


def hints_of(symbolic: Sequence[torch.Tensor], example: Sequence[torch.Tensor]) -> dict[sympy.Symbol, int]:
    """Return the sizes of torch's symbols in the example."""
    return {
        _expr(size): number
        for tensor, real in zip(symbolic, example, strict=True)
        for size, number in zip(tensor.shape, real.shape, strict=True)
        if isinstance(_expr(size), sympy.Symbol)
    }


def names_of(symbolic: Sequence[torch.Tensor], names: Mapping[Place, str]) -> dict[sympy.Symbol, str]:
    """Return the user's names of torch's symbols."""
    exprs = {_expr(symbolic[position].shape[dim]): name for (position, dim), name in names.items()}
    return {expr: name for expr, name in exprs.items() if isinstance(expr, sympy.Symbol)}
