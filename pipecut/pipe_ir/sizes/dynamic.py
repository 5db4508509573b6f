"""Sizes of the inputs that the user wants symbolic, by the `dynamic` option, and sizes that mean the same.

A mask of shape [batch, seq] that is read as `mask[torch.arange(batch), ...]` may have more rows than the batch as
far as torch is concerned. Row i belongs to sample i all the same: if the batch is cut, the mask has to be cut with it.
"""

from __future__ import annotations

import builtins
import difflib
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch.fx import Node

from ...errors import InputError
from ...text import shape_text
from ..operators import operator_name, operator_of
from ..tracing.records import RecordedNode

# What a user writes for one input: names by dim, the dims without names, or the names of all dims in order.
_DimNames: TypeAlias = Mapping[int, str | None] | Sequence[int] | Sequence[str | int | None]
AUTO = "auto"  # or one word: all sizes that the model's code leaves free
Dynamic: TypeAlias = Mapping[str, _DimNames] | Literal["auto"]
Place = tuple[int, int]  # the nth tensor of a call, and a dim of it

# Sizes are variables of the generated code: these names mean something else there.
_TAKEN = {"self", "torch", "device", "math", *keyword.kwlist, *dir(builtins)}


@dataclass(frozen=True)
class DynamicDims:
    """Dims that the user asked for. Places with one name are one size; a place without a name gets one later.

    With `auto` all dims are symbols when the trace begins, and those stay symbols that the code leaves free. Dims of
    size 1 are not, apart from the batch: they are there to be broadcast.
    """

    asked: Mapping[Place, str | None] = field(default_factory=dict)
    fixed: frozenset[Place] = frozenset()
    auto: bool = False

    @property
    def names(self) -> dict[Place, str]:
        """Names that the user gave."""
        return {place: name for place, name in self.asked.items() if name is not None}

    def symbolic(self, shapes: Sequence[Sequence[int]]) -> set[Place]:
        """Return the dims that are symbols at the beginning of a trace: those that were asked for, and the batch."""
        # One row beside others of several is meant to be broadcast, like a mask of shape [1, T]: not a batch of one.
        batched = any(shape and shape[0] > 1 for shape in shapes)
        firsts = {(nth, 0) for nth, shape in enumerate(shapes) if shape and not (batched and shape[0] == 1)}
        others = {
            (nth, dim) for nth, shape in enumerate(shapes) for dim, size in enumerate(shape) if dim > 0 and size > 1
        }
        return {*self.asked, *firsts, *self.alike(shapes), *(others if self.auto else ())} - self.fixed

    def alike(self, shapes: Sequence[Sequence[int]]) -> set[Place]:
        """Return dims without a name that are as large as one with a name: the model may turn out to tie them."""
        named = {
            shapes[nth][dim] for (nth, dim), name in self.names.items() if name != "batch" and shapes[nth][dim] > 1
        }
        places = {(nth, dim) for nth, shape in enumerate(shapes) for dim in range(1, len(shape))}
        return {(nth, dim) for nth, dim in places - self.asked.keys() - self.fixed if shapes[nth][dim] in named}


NOTHING_ASKED = DynamicDims()


def read_dynamic(dynamic: Any, tensors: Mapping[str, torch.Tensor], model_name: str) -> DynamicDims:
    """Check the `dynamic` option against the tensors of the example, given by path in the order of the call.

    >>> ids = torch.zeros(4, 10)
    >>> read_dynamic({"ids": {1: "seq"}, "mask": ("batch", "seq")}, {"ids": ids, "mask": ids}, "Net").names
    {(0, 1): 'seq', (1, 0): 'batch', (1, 1): 'seq'}
    """
    if dynamic is None:
        return NOTHING_ASKED
    if isinstance(dynamic, str) and dynamic == AUTO:
        return DynamicDims(auto=True)
    if not isinstance(dynamic, Mapping):
        got = repr(dynamic) if isinstance(dynamic, str) else type(dynamic).__name__
        raise InputError(
            f'dynamic must be "auto", or a dict from inputs to the names of their dims, such as '
            f'{{"{next(iter(tensors))}": {{0: "batch"}}}}; got {got}'
        )
    paths = list(tensors)
    asked: dict[Place, str | None] = {}
    fixed: set[Place] = set()
    for path, wish in dynamic.items():
        found = _path(path, tensors, model_name)
        for dim, name in _names_by_dim(found, tensors[found], wish).items():
            place = (paths.index(found), dim)
            if isinstance(name, int):
                fixed.add(place)
                continue
            if asked.get(place, name) != name:
                raise InputError(_two_names(found, dim, asked[place], name))
            asked[place] = name
    _check_one_size_per_name(asked, tensors)
    return DynamicDims(asked, frozenset(fixed))


def _path(given: Any, tensors: Mapping[str, torch.Tensor], model_name: str) -> str:
    """Return the path of the input that is meant: its path, or its name alone if it came through `**kwargs`."""
    if given in tensors:
        return str(given)
    alike = [path for path in tensors if path.endswith(f"[{given!r}]")]
    if len(alike) == 1:
        return alike[0]
    inputs = ", ".join(f"{path} {shape_text(tensor.shape)}" for path, tensor in tensors.items())
    inside = [path for path in tensors if path.startswith((f"{given}[", f"{given}."))]
    near = inside or difflib.get_close_matches(str(given), tensors, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(
        f"dynamic names {given!r}, which is not a tensor input of {model_name} in the example{hint}\n  inputs: {inputs}"
    )


def _names_by_dim(path: str, tensor: torch.Tensor, wish: Any) -> dict[int, str | int | None]:
    """Return for each dim that is mentioned its name, None if it gets one later, or the one size that it has."""
    if isinstance(wish, Mapping):
        pairs = list(wish.items())
    elif isinstance(wish, Sequence) and not isinstance(wish, str) and all(_is_number(item) for item in wish):
        pairs = [(dim, None) for dim in wish]
    elif isinstance(wish, Sequence) and not isinstance(wish, str):
        pairs = _pairs_of_shape(path, tensor, wish)
    else:
        raise InputError(_unreadable(path, wish))
    named: dict[int, str | int | None] = {}
    for dim, name in pairs:
        if not _is_number(dim):
            raise InputError(_unreadable(path, wish))
        if not -tensor.dim() <= dim < tensor.dim():
            raise InputError(
                f"dynamic names dim {dim} of {path}, which has {tensor.dim()} dims in the example: "
                f"{shape_text(tensor.shape)}; use dims 0 to {tensor.dim() - 1}"
                if tensor.dim()
                else f"dynamic names dim {dim} of {path}, which is a tensor without dims; leave it out"
            )
        _check_name(path, dim, name, tensor)
        dim %= tensor.dim()
        if named.get(dim, name) != name:
            raise InputError(_two_names(path, dim, named[dim], name))
        named[dim] = name
    return named


def _pairs_of_shape(path: str, tensor: torch.Tensor, shape: Sequence[Any]) -> list[tuple[int, Any]]:
    if len(shape) != tensor.dim():
        raise InputError(
            f"dynamic has {tuple(shape)} for {path}, which has {tensor.dim()} dims in the example: "
            f"{shape_text(tensor.shape)}; give each dim a name, or None to leave it as it is"
        )
    return [(dim, name) for dim, name in enumerate(shape) if name is not None]


def _check_name(path: str, dim: int, name: Any, tensor: torch.Tensor) -> None:
    if _is_number(name):
        if name != tensor.shape[dim]:
            raise InputError(
                f"dynamic says that dim {dim} of {path} is {name}, and it is {tensor.shape[dim]} in the example; "
                "give it a name if it can have several sizes"
            )
    elif name is not None and not (isinstance(name, str) and name.isidentifier() and name not in _TAKEN):
        raise InputError(
            f"dynamic calls dim {dim} of {path} {name!r}, which cannot be the name of a size; use a word such as "
            "'seq' that means nothing else in Python"
        )


def _check_one_size_per_name(asked: Mapping[Place, str | None], tensors: Mapping[str, torch.Tensor]) -> None:
    paths, shapes = list(tensors), [tensor.shape for tensor in tensors.values()]
    first: dict[str, Place] = {}
    for (nth, dim), name in asked.items():
        if name is None:
            continue
        other, other_dim = first.setdefault(name, (nth, dim))
        if shapes[nth][dim] != shapes[other][other_dim]:
            raise InputError(
                f"dynamic calls both dim {other_dim} of {paths[other]} and dim {dim} of {paths[nth]} {name!r}, and "
                f"they are {shapes[other][other_dim]} and {shapes[nth][dim]} in the example; one name is one size: "
                "use two names, or an example in which they are the same"
            )


def _two_names(path: str, dim: int, one: Any, other: Any) -> str:
    return f"dynamic calls dim {dim} of {path} both {one!r} and {other!r}; keep one of the names"


def _unreadable(path: str, wish: Any) -> str:
    return (
        f'dynamic has {wish!r} for {path}; write the names by dim, {{1: "seq"}}, or those of all dims, '
        '("batch", "seq"), or the dims alone, [1]'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
