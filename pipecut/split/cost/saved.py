"""Memory that autograd keeps of an operation until its backward.

The records of operators (`pipe_ir.operators`) name the rule of those that are met most; the others are tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...pipe_ir import Dim, Operation, Ref, TracedModel, operator_of
from .trial import arguments_of, try_operation


def bytes_of(op: Operation) -> Dim:
    """Return the bytes of the tensor that an operation makes, as an expression of the symbolic dims."""
    return 0 if op.spec is None else op.spec.nbytes


class MemoryMap:
    """The operation that allocated the memory of each value; flags for values of weights and constants only.

    A view keeps all of the memory alive that it looks at, so that memory is counted by who made it.
    """

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self.maker: list[int] = []
        self.is_weight: list[bool] = []
        latest: dict[int | None, int] = {}
        for op in traced.operations:
            maker = op.index if op.storage is None or _makes_new_memory(op) else latest.get(op.storage)
            if maker is None:
                maker = next((self.maker[ref] for ref in op.refs if traced.operations[ref].storage == op.storage), None)
            maker = op.index if maker is None else maker
            latest[op.storage] = maker
            self.maker.append(maker)
            self.is_weight.append(_is_weight(op, self.is_weight))

    def is_view(self, op: Operation) -> bool:
        """Return True if an operation only looks at memory that was there before."""
        return op.kind == "op" and self.maker[op.index] != op.index and not op.writes

    def is_activation(self, index: int) -> bool:
        """Return True if a value takes memory in each microbatch: a parameter, a buffer or a view of one does not."""
        return (
            self._traced.operations[self.maker[index]].kind in ("op", "input")
            and self._traced.operations[index].kind != "mark"
        )

    def held(self, index: int) -> Dim:
        """Return the bytes that a value keeps alive."""
        return bytes_of(self._traced.operations[self.maker[index]])


def _makes_new_memory(op: Operation) -> bool:
    """Return True if an operation that may hand back its argument (dropout) has work to do here."""
    if not operator_of(op.target).passes_through or len(op.args) < 3:
        return False
    return bool(op.args[2]) and op.args[1] != 0


def _is_weight(op: Operation, known: list[bool]) -> bool:
    if op.kind != "op":
        return op.kind in ("state", "constant")
    return bool(op.refs) and all(known[index] for index in op.refs)


@dataclass(frozen=True)
class _Saved:
    """Memory that is kept: `key` says which, as several operations may keep the same."""

    key: int  # the operation that made it; negative for memory that an operation makes for itself
    bytes: Dim


class SavedValues:
    """Values that each operation keeps for the backward. Parameters are held anyway, and are not among them."""

    def __init__(self, traced: TracedModel, memory: MemoryMap) -> None:
        self.traced, self.memory = traced, memory
        self._inside = _kept_whole(traced)

    def of(self, op: Operation) -> tuple[_Saved, ...]:
        """Return what an operation keeps; the first one of a checkpoint keeps the checkpoint's arguments."""
        if op.kind != "op":
            return ()
        if op.index in self._inside:
            return self._values(self._inside[op.index])
        if not self.needs_gradient(op) or self.memory.is_view(op):
            return ()
        return tuple({saved.key: saved for saved in _RULES[operator_of(op.target).saves](self, op)}.values())

    def needs_gradient(self, op: Operation) -> bool:
        """Return True if an operation has a backward; one that returns several tensors is judged by its arguments."""
        if op.spec is None:
            return op.context.grad and any(map(self.index_needs_gradient, op.refs))
        return op.spec.requires_grad

    def index_needs_gradient(self, index: int) -> bool:
        """Return True if a gradient flows back into a value."""
        spec = self.traced.operations[index].spec
        return spec is not None and spec.requires_grad

    def value(self, ref: Any) -> Iterator[_Saved]:
        """Yield the memory of a value, if it is an activation."""
        if isinstance(ref, Ref) and self.memory.is_activation(ref.index):
            yield _Saved(self.memory.maker[ref.index], self.memory.held(ref.index))

    def own(self, op: Operation, size: Dim) -> Iterator[_Saved]:
        """Yield memory that an operation makes besides its result."""
        yield _Saved(-1 - op.index, size)

    def _values(self, indices: tuple[int, ...]) -> tuple[_Saved, ...]:
        found = {saved.key: saved for index in indices for saved in self.value(Ref(index))}
        return tuple(found.values())


_Rule = Callable[[SavedValues, Operation], Iterator[_Saved]]


def _kept_whole(traced: TracedModel) -> dict[int, tuple[int, ...]]:
    """Map operations of checkpoints and autograd functions to the values that are kept: the first has them all."""
    inside: dict[int, tuple[int, ...]] = {}
    for span in traced.spans():
        if span.kind == "call":
            continue
        kept = span.args.refs if span.kind == "checkpoint" else (*span.args.refs, *span.result.refs)
        for op in traced.operations_within(span.begin, span.end):
            if op.kind == "op" and op.index not in inside:
                inside[op.index] = kept
                kept = ()
    return inside


def _nothing(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    yield from ()


def _output(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    yield from saved.value(Ref(op.index))


def _first(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    yield from saved.value(op.args[0])


def _as_tried(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield what autograd keeps in a trial; without one, the arguments through which a gradient flows."""
    tried = try_operation(saved.traced, op)
    if tried is None or tried.kept is None:
        for index in filter(saved.index_needs_gradient, op.refs):
            yield from saved.value(Ref(index))
        return
    arguments = arguments_of(op)
    for slot in tried.kept.arguments:
        yield from saved.value(Ref(arguments[slot]))
    if tried.kept.result:
        yield from _output(saved, op)
    if tried.kept.others != 0:
        yield from saved.own(op, tried.kept.others)


def _all_inputs(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    for index in op.refs:
        yield from saved.value(Ref(index))


def _indices(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield arguments of integers or truth values: they say which elements were taken."""
    for index in op.refs:
        spec = saved.traced.operations[index].spec
        if spec is not None and not spec.dtype.is_floating_point:
            yield from saved.value(Ref(index))


def _product(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield each factor, if a gradient flows into another one."""
    factors = [ref for ref in op.args if isinstance(ref, Ref)]
    factors += [ref for arg in op.args if isinstance(arg, list | tuple) for ref in arg if isinstance(ref, Ref)]
    for place, factor in enumerate(factors):
        others = factors[:place] + factors[place + 1 :]
        if any(saved.index_needs_gradient(other.index) for other in others):
            yield from saved.value(factor)


def _batched_product(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield factors as of a product, or the copies that are made first of batches that are not in order."""
    pairs = ((op.args[0], op.args[1]), (op.args[1], op.args[0]))
    for place, (factor, other) in enumerate(pairs):
        if not isinstance(other, Ref) or not saved.index_needs_gradient(other.index):
            continue
        spec = saved.traced.operations[factor.index].spec if isinstance(factor, Ref) else None
        if spec is None or len(spec.shape) < 3 or _batches_in_order(spec.shape, spec.stride):
            yield from saved.value(factor)
        elif saved.memory.is_activation(factor.index):
            yield _Saved(
                -2 * len(saved.traced.operations) - 2 * op.index - place,
                bytes_of(saved.traced.operations[factor.index]),
            )


def _batches_in_order(shape: tuple[Dim, ...], stride: tuple[Dim, ...]) -> bool:
    """Return True if all dims but the last two can be seen as one."""
    batch = range(len(shape) - 3)
    return all(shape[dim] == 1 or stride[dim] == stride[dim + 1] * shape[dim + 1] for dim in batch)


def _linear(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield the input, for the gradient of the weight; the weight is counted only where it is made in the forward."""
    value, weight = op.args[:2]
    if isinstance(weight, Ref) and saved.index_needs_gradient(weight.index):
        yield from saved.value(value)
    if isinstance(value, Ref) and saved.index_needs_gradient(value.index):
        yield from saved.value(weight)


def _quotient(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    dividend, divisor = op.args[:2]
    yield from saved.value(divisor)
    if isinstance(divisor, Ref) and saved.index_needs_gradient(divisor.index):
        yield from saved.value(dividend)


def _power(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    yield from _first(saved, op)
    exponent = op.args[1]
    if isinstance(exponent, Ref):
        yield from saved.value(exponent)
        yield from _output(saved, op)


def _dropout(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield the mask: a byte for each element, or a factor of its own type on the CPU."""
    if _makes_new_memory(op):
        size = bytes_of(op)
        itemsize = op.spec.dtype.itemsize if op.spec is not None else 1
        yield from saved.own(op, size if saved.traced.device.type == "cpu" else size / itemsize)


def _max_pool(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield the input, and for each result from which place it is."""
    yield from _first(saved, op)
    yield from saved.own(op, bytes_of(op) / op.spec.dtype.itemsize * 8 if op.spec is not None else 0)


def _cross_entropy(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield the logarithms of all probabilities, and the target."""
    logits = op.args[0]
    yield from saved.own(op, bytes_of(saved.traced.operations[logits.index]))
    for argument in op.args[1:3]:
        yield from saved.value(argument)


def _recurrent(saved: SavedValues, op: Operation) -> Iterator[_Saved]:
    """Yield the input, and for each position and layer the gates and states, on the CPU in many small tensors."""
    yield from _first(saved, op)
    place = next(place for place, arg in enumerate(op.args) if type(arg) is int)
    layers, directions = op.args[place], 1 + bool(op.args[place + 3])
    positions = saved.traced.operations[op.args[0].index].spec
    weights = next((arg for arg in op.args[1:] if isinstance(arg, list | tuple) and len(arg) > 2), ())
    hidden = saved.traced.operations[weights[1].index].spec if weights else None
    if positions is not None and hidden is not None:
        volume = positions.shape[0] * positions.shape[1] * hidden.shape[-1] * positions.dtype.itemsize
        gates = operator_of(op.target).recurrent_values if saved.traced.device.type == "cpu" else 8
        # A layer's results, put together, are the input of the next one.
        yield from saved.own(op, (gates * layers + layers - 1) * directions * volume)


_RULES: Mapping[str | None, _Rule] = {
    "nothing": _nothing,
    "result": _output,
    "first argument": _first,
    "all arguments": _all_inputs,
    "indices": _indices,
    "factors": _product,
    "batched factors": _batched_product,
    "input and weight": _linear,
    "quotient": _quotient,
    "power": _power,
    "dropout mask": _dropout,
    "maxima": _max_pool,
    "log probabilities": _cross_entropy,
    "recurrent states": _recurrent,
    None: _as_tried,
}
