"""Symbolic sizes of a trace as sympy expressions with readable names."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch

from ...torch_internals import asks_for_plain_number, let_go, traced_operator, watch_size_decisions
from ..operators import operator_name, operator_of
from ..spec import Dim, TensorSpec
from ..tracing.records import OpenSpan, user_line
from .dynamic import NOTHING_ASKED, Decision, DynamicDims, Place, implied_equalities, related

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
        self._specs: dict[tuple[int, bool], tuple[torch.Tensor, TensorSpec]] = {}  # with the tensors: their ids count
        self.origin: dict[sympy.Symbol, Place] = {}
        places = {
            (position, dim): _expr(size)
            for position, (_, tensor) in enumerate(inputs)
            for dim, size in enumerate(tensor.shape)
        }
        self._merge_names(places, names)
        self._resolve_alike(places, asked, shapes, decisions)
        if asked.auto:
            self._tie_related(places, shapes, decisions)
        for one, other in implied_equalities(decisions, self._resolved):
            self._merge(one, other, places)
        wishes: dict[sympy.Basic, str] = {}
        for place, name in names.items():
            if isinstance(self._resolved(places[place]), sympy.Symbol):
                wishes.setdefault(self._resolved(places[place]), name)
        self.named = frozenset(wishes.values())
        # A length that is the first dim of one input and another dim of the next is not the batch.
        lengths = {self._resolved(expr) for (_, dim), expr in places.items() if dim > 0}
        for (position, dim), expr in places.items():
            symbol = self._resolved(expr)
            if isinstance(symbol, sympy.Symbol) and symbol not in self._renamed:
                is_batch = dim == 0 and symbol not in lengths
                name = wishes.get(symbol) or self._fresh(inputs[position][0], dim, is_batch=is_batch)
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
                # Not a size of the same input: a square tensor would be square forever.
                named = [at for at in asked.names if at[0] != nth and shapes[at[0]][at[1]] == size]
                others = [self._resolved(places[at]) for at in named]
                self._merged[symbol] = related(symbol, others, decisions, self._resolved) or sympy.Integer(size)

    def _tie_related(
        self, places: Mapping[Place, Any], shapes: Sequence[Sequence[int]], decisions: Sequence[Decision]
    ) -> None:
        """Tie lengths of different inputs that are as large in the example, and that the code has compared.

        Of `rows*length == batch*seq`, after a reshape, torch keeps the equation.
        """
        lengths = [place for place in sorted(places) if place[1] > 0]
        for nth, dim in lengths:
            symbol, size = self._resolved(places[nth, dim]), shapes[nth][dim]
            before = [at for at in lengths if at[0] < nth and shapes[at[0]][at[1]] == size]
            others = [self._resolved(places[at]) for at in sorted(before, key=lambda at: at[1] != dim)]
            if isinstance(symbol, sympy.Symbol) and symbol not in others:
                other = related(
                    symbol, [each for each in others if isinstance(each, sympy.Symbol)], decisions, self._resolved
                )
                if other is not None:
                    self._merged[symbol] = other

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

    def _fresh(self, name: str, dim: int, *, is_batch: bool) -> str:
        taken = {*map(str, self.origin), *self.named}
        plain = re.sub(r"\W+", "_", name).strip("_")
        wish = "batch" if is_batch and "batch" not in taken else f"{plain}_dim{dim}"
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
        """Return the spec of a traced tensor; of one that stands for several values it is one object."""
        known = self._specs.get((id(tensor), requires_grad))
        if known is not None:
            return known[1]
        strided = tensor.layout == torch.strided
        stride = tuple(map(self._dim, tensor.stride())) if strided else ()
        spec = TensorSpec(tuple(map(self._dim, tensor.shape)), tensor.dtype, stride, requires_grad)
        self._specs[id(tensor), requires_grad] = tensor, spec
        return spec

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


# Decisions of a model's code about symbolic sizes while it is traced, with their calls and lines.


_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])


def _is_about_layout(expr: sympy.Basic, answer: Any) -> bool:
    """Return True if a question concerns the layout of tensors, and has the answer of all sizes but 0 and 1.

    Whether a tensor is contiguous depends on the dims of size 1. torch asks that to know the result of an operation.
    The operation itself is in the trace, and asks again when it runs.
    """
    return _is_general(expr, answer) and _is_asked_by_torch(_says_unequal(expr, answer))


def _says_unequal(expr: sympy.Basic, answer: Any) -> bool:
    return isinstance(expr, sympy.Ne if answer else sympy.Eq)


@functools.lru_cache(maxsize=4096)
def _is_general(expr: sympy.Basic, answer: Any) -> bool:
    symbols = sorted(expr.free_symbols, key=str)
    large = {symbol: sympy.prime(1000 + nth) for nth, symbol in enumerate(symbols)}
    return bool(expr.subs(large) == answer)


def _is_asked_by_torch(unequal: bool) -> bool:
    """Return True if an operation asks, or a method of a tensor that makes no operation, like contiguous().

    An operation that asks whether a size is 1, and gets the answer no, gives a result whose shape is right for 1 too: a
    size that is broadcast has been tied to the other one. Only squeeze is different. Other questions may decide on a
    shape, as in `x[:2]`.
    """
    frame: FrameType | None = sys._getframe(2)
    by_python = False
    while frame is not None:
        operator = traced_operator(frame)
        if operator is not None:
            squeezes = operator_name(operator) == "aten::squeeze"
            return operator_of(operator).shape_by_arithmetic or (unequal and not squeezes)
        if not frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)):
            return not by_python
        by_python = by_python or asks_for_plain_number(frame)
        frame = frame.f_back
    return False


class SizeDecisions:
    """Recorder of the decisions of one trace.

    `made` are the decisions, an expression and the answer, with the calls in which they were made; `lines` the lines of
    code; `replaced` what symbols turned out to be, and where; `input_sizes` the sizes of the inputs at the beginning.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, Any], dict[int, OpenSpan]] = {}
        self.lines: dict[tuple[Any, Any, int], str] = {}
        self.replaced: dict[Any, tuple[Any, str]] = {}
        self.input_sizes: list[tuple[Any, ...]] = []
        self._shape_env: Any = None

    def listen(self, tensors: Sequence[torch.Tensor], open_spans: Sequence[OpenSpan]) -> None:
        """Record the decisions in the innermost of the open spans, also those that torch knows the answer to by now."""
        environments = (tensor.fake_mode.shape_env for tensor in tensors if hasattr(tensor, "fake_mode"))
        self._shape_env = next(environments, None)
        if self._shape_env is None:
            return
        self.input_sizes = [tuple(_expression(size) for size in tensor.shape) for tensor in tensors]

        def note_replaced(symbol: sympy.Symbol, value: sympy.Basic) -> None:
            self.replaced[symbol] = (value, user_line())

        def note_decided(expr: sympy.Basic, answer: Any) -> None:
            if open_spans:
                self._note(expr, answer, open_spans[-1])

        watch_size_decisions(self._shape_env, note_replaced, note_decided)

    def end(self) -> None:
        """Record no more: the traced run is over, or has failed."""
        if self._shape_env is not None:
            let_go(self._shape_env)

    @property
    def replacements(self) -> dict[Any, Any]:
        """Values that torch has found for symbolic sizes."""
        return {} if self._shape_env is None else dict(self._shape_env.replacements)

    def copy(self, spans: Mapping[int, OpenSpan]) -> None:
        """Record the decisions of some spans, by their ids, for others too."""
        for (expr, answer), known in self.made.items():
            for span in [span for span in known if span in spans]:
                other = spans[span]
                known[id(other)] = other
                self.lines.setdefault((expr, answer, id(other)), self.lines[expr, answer, span])

    def _note(self, expr: Any, answer: Any, span: OpenSpan) -> None:
        spans = self.made.get((expr, answer), {})
        if id(span) not in spans and not _is_about_layout(expr, answer):
            self.made.setdefault((expr, answer), spans)[id(span)] = span
            self.lines[expr, answer, id(span)] = user_line()


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
