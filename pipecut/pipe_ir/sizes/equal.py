"""Sizes of inputs that are the same by the meaning of the model's code, though it would run if they were not.

A mask of shape [batch, seq] that is read as `mask[torch.arange(batch), ...]` may have more rows than the batch as
far as torch is concerned. Row i belongs to sample i all the same: if the batch is cut, the mask has to be cut with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..operators import operator_name, operator_of
from ..tracing.records import RecordedNode

_Hints = Mapping[sympy.Symbol, int]

_EVERYTHING = (0, 2**63 - 1)  # numbers[:, None] begins with numbers[0:...]


def same_sizes(
    nodes: Sequence[RecordedNode], inputs: Sequence[Node], hints: _Hints, names: Mapping[sympy.Symbol, str]
) -> dict[sympy.Symbol, sympy.Symbol]:
    """Return symbols to replace by others: those of inputs that are read row by row, attended to, or not at all.

    `names` are those that the user gave: sizes of different names stay apart.
    """
    recorded = {node.node: node for node in nodes}
    free = {_symbol_of(node) for node in inputs} - {None}
    merged: dict[sympy.Symbol, sympy.Symbol] = {}
    for node in nodes:
        for rows, others in _pairs_of(node, recorded):
            alike = names.get(rows, names.get(others)) == names.get(others, names.get(rows))
            if rows != others and {rows, others} <= free and hints[rows] == hints[others] and alike:
                merged.setdefault(rows, others)
    unused = _of_unused(nodes, inputs, hints, merged)
    return _chained(merged | {symbol: batch for symbol, batch in unused.items() if symbol not in names})


def _pairs_of(node: RecordedNode, recorded: Mapping[Node, RecordedNode]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of sizes that an operation takes for one."""
    if node.op != "call_function":
        return
    name = operator_name(node.target)
    if name == "aten::index":
        yield _rows(node.args[0], recorded), _row_numbers(node.args[1][0], recorded)
    elif "scaled_dot_product" in name:  # whose shape is worked out from the queries alone
        query, *others = _tensors(node.args[:3], recorded)
        for other in others:
            yield _symbol(other.value.shape[0]), _symbol(query.value.shape[0])


def _of_unused(
    nodes: Sequence[RecordedNode],
    inputs: Sequence[Node],
    hints: _Hints,
    merged: Mapping[sympy.Symbol, sympy.Symbol],
) -> dict[sympy.Symbol, sympy.Symbol]:
    """Return the symbols of inputs that no operation reads: these belong to the batch if they have as many rows."""
    read = {argument for node in nodes for argument in node.node.all_input_nodes}
    firsts = [(node, _symbol_of(node)) for node in inputs]
    used = {symbol for node, symbol in firsts if symbol is not None and node in read}
    batch = next((symbol for node, symbol in firsts if symbol in used and symbol not in merged), None)
    if batch is None:
        return {}
    unused = [symbol for _, symbol in firsts if symbol is not None and symbol not in used]
    return {symbol: batch for symbol in unused if hints[symbol] == hints[batch]}


def _chained(merged: dict[sympy.Symbol, sympy.Symbol]) -> dict[sympy.Symbol, sympy.Symbol]:
    """Replace each symbol by the end of its chain."""
    for symbol in merged:
        end = merged[symbol]
        while end in merged and merged[end] != symbol:
            end = merged[end]
        merged[symbol] = end
    return {symbol: end for symbol, end in merged.items() if symbol != end}


def _rows(value: Any, recorded: Mapping[Node, RecordedNode]) -> sympy.Symbol | None:
    """Return the number of rows of an input, if these are its rows one by one."""
    node = recorded.get(value)
    while node is not None and node.op == "call_function" and operator_of(node.target).keeps_rows:
        rows = node.value.shape[:1]
        tensors = [item for item in _tensors(node.args, recorded) if rows and item.value.shape[:1] == rows]
        node = tensors[0] if len(tensors) == 1 else None
    if node is None or node.op != "placeholder" or not isinstance(node.value, torch.Tensor) or not node.value.dim():
        return None
    return _symbol(node.value.shape[0])


def _row_numbers(value: Any, recorded: Mapping[Node, RecordedNode]) -> sympy.Symbol | None:
    """Return the length of a list of numbers, if they are 0, 1, 2..."""
    node = recorded.get(value)
    while node is not None and node.op == "call_function":
        name = operator_name(node.target).removeprefix("aten::")
        if name == "arange":
            numbers = [item for item in node.args if isinstance(item, int | torch.SymInt | Node)]
            plain = len(numbers) == 1 or (len(numbers) == 2 and numbers[0] == 0)
            return _symbol(node.value.shape[0]) if plain else None
        whole = name == "slice" and tuple(node.args[2:]) == _EVERYTHING
        node = recorded.get(node.args[0]) if whole or operator_of(node.target).keeps_numbers else None
    return None


def _tensors(values: Iterable[Any], recorded: Mapping[Node, RecordedNode]) -> list[RecordedNode]:
    nodes = [recorded[value] for value in values if isinstance(value, Node) and value in recorded]
    return [node for node in nodes if isinstance(node.value, torch.Tensor)]


def _symbol_of(node: Node) -> sympy.Symbol | None:
    """Return the number of rows of an input."""
    value = node.meta["val"]
    return _symbol(value.shape[0]) if value.dim() else None


def _symbol(size: Any) -> sympy.Symbol | None:
    expr = size.node.expr if isinstance(size, torch.SymInt) else None
    return expr if isinstance(expr, sympy.Symbol) else None


_Resolve = Callable[[Any], Any]
Decision = tuple[sympy.Basic, Any]  # what was asked, and the answer


def implied_equalities(
    decisions: Iterable[Decision], resolved: _Resolve
) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """Yield pairs of symbols that are one size by the decisions of the code, where torch does not conclude it.

    Of `batch*seq == rows*seq` torch keeps the equation, and of `seq <= length`, `length <= seq` both halves.
    """
    at_most: set[sympy.Basic] = set()
    for decision in decisions:
        for difference, is_equation in _differences(decision, resolved):
            if is_equation or -difference in at_most:
                yield from _solved(difference)
            at_most.add(difference)


def related(
    symbol: sympy.Symbol, others: Iterable[sympy.Symbol], decisions: Iterable[Decision], resolved: _Resolve
) -> sympy.Symbol | None:
    """Return the first of the other symbols that the code has compared this one with."""
    compared = [
        difference.free_symbols
        for decision in decisions
        for difference, is_equation in _differences(decision, resolved)
        if symbol in difference.free_symbols and (is_equation or len(difference.free_symbols) == 2)
    ]
    return next((other for other in others if any(other in symbols for symbols in compared)), None)


def _differences(decision: Decision, resolved: _Resolve) -> Iterator[tuple[sympy.Basic, bool]]:
    """Yield a decision as a difference that is at most 0 (False) or equal to 0 (True); nothing for any other."""
    expr, answer = decision
    if not isinstance(expr, sympy.core.relational.Relational):
        return
    held = expr if answer else sympy.Not(expr)
    if not isinstance(held, sympy.core.relational.Relational):
        return
    write = _FORMS.get(type(held))
    if write is not None:
        difference = sympy.expand(write(resolved(held.lhs), resolved(held.rhs)))
        yield difference, isinstance(held, sympy.Eq)


_FORMS: Mapping[type, Callable[[Any, Any], Any]] = {
    sympy.Eq: lambda lhs, rhs: lhs - rhs,
    sympy.Le: lambda lhs, rhs: lhs - rhs,
    sympy.Ge: lambda lhs, rhs: rhs - lhs,
}


def _solved(difference: sympy.Basic) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """Yield the two symbols of an equation that says no more than that they are equal: `a - b`, or `a*c - b*c`."""
    terms = sympy.Add.make_args(difference)
    if len(terms) != 2:
        return
    above, below = sympy.fraction(sympy.cancel(-terms[0] / terms[1]))
    if isinstance(above, sympy.Symbol) and isinstance(below, sympy.Symbol):
        yield above, below
