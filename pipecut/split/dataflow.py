"""Dataflow between stages: the values that each makes, takes and sends, as the edges of a cut model."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch

from ..errors import InputError, SplitError
from ..pipe_ir import HERE, Edge, Operation, Ref, Template, TensorSpec, TracedModel, UnsentOutput, first_key
from ..text import listed
from .program import Key, Piece, defined_by, keys_in, used_by_items


@dataclass
class StageFlow:
    """Inputs and outputs of one stage. `sizes` says which input's dim each symbol is."""

    inputs: list[int]
    outputs: list[int] = field(default_factory=list)
    sizes: dict[sympy.Symbol, tuple[int, int]] = field(default_factory=dict)
    rewritten: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Flow:
    """The flow of all stages."""

    stages: tuple[StageFlow, ...]
    edges: tuple[Edge, ...]
    only_returned: tuple[int, ...]
    unsent: tuple[UnsentOutput, ...] = ()


def flow(traced: TracedModel, cuts: Sequence[int], programs: Sequence[Piece], names: Mapping[int, str]) -> Flow:
    """Find each stage's inputs and outputs, and connect them."""
    return FlowFinder(traced, cuts, programs, names).find()


class FlowFinder:
    """Search for the way of values from the stages that make them to those that use them."""

    def __init__(
        self, traced: TracedModel, cuts: Sequence[int], programs: Sequence[Piece], names: Mapping[int, str]
    ) -> None:
        self.traced = traced
        self.cuts = cuts
        self.programs = programs
        self.names = names
        self.last = len(programs) - 1
        self.made = [defined_by(program) for program in programs]
        # A value that is recomputed in later stages comes from the first stage that makes it.
        self.made_in = {index: stage for stage, made in reversed(list(enumerate(self.made))) for index in made}
        self.writers = self._writers()

    def needs(self, stage: int) -> frozenset[Key]:
        """Return what a stage uses and does not make, its own state and the model's output included."""
        used = used_by_items(self.programs[stage].items)
        if stage < self.last:
            return used
        # With one stage all inputs of the model are at hand.
        return used | (keys_in(self.traced.output) - (self.traced.optional_outputs if self.last else frozenset()))

    def find(self) -> Flow:
        """Return the flow between all stages."""
        stages = [self._stage(index, self.needs(index)) for index in range(len(self.programs))]
        edges = [self._edge(value, index) for index, stage in enumerate(stages) for value in stage.inputs]
        connected = [edge for edge in edges if edge is not None]
        for edge in connected:
            outputs = stages[edge.source].outputs
            if edge.kind == "activation" and edge.value not in outputs:
                outputs.append(edge.value)
        used_by_last = used_by_items(self.programs[self.last].items)
        only_returned = [
            edge.value
            for edge in connected
            if edge.kind == "activation" and edge.target == self.last and edge.value not in used_by_last
        ]
        return Flow(tuple(stages), tuple(connected), tuple(only_returned), tuple(self._unsent(stages[-1])))

    def _unsent(self, last: StageFlow) -> Iterator[UnsentOutput]:
        """Yield the outputs that the last stage neither makes nor gets; a stage may not even make them."""
        names = _output_names(self.traced.output)
        there = self.made[self.last] | {*last.inputs}
        for value in sorted(names.keys() & self.traced.optional_outputs - there):
            op = self.traced.operations[value]
            if self.last and op.kind in ("op", "input"):
                stage = 0 if op.kind == "input" else bisect.bisect_right(self.cuts, op.tick)
                yield UnsentOutput(value, names[value], stage, self.spec(value))

    def arriving(self, stage: int, keys: frozenset[Key]) -> list[int]:
        """Return the values that come into a stage if it uses the keys."""
        return self._inputs(stage, keys)[0]

    def sender(self, value: int, stage: int) -> int:
        """Return the stage that sends a value to another one."""
        return self._source(value, stage) or 0

    def spec(self, value: int) -> TensorSpec:
        """Return the spec of a value when it is sent."""
        return _spec(self.traced.operations[value], self.traced)

    def _stage(self, index: int, keys: frozenset[Key]) -> StageFlow:
        inputs, sizes = self._inputs(index, keys)
        self._check_aliases(index, inputs)
        rewritten = frozenset(value for value in inputs if self._is_written_in(value, index))
        return StageFlow(sorted(inputs, key=self._order), [], sizes, rewritten)

    def _inputs(self, index: int, keys: frozenset[Key]) -> tuple[list[int], dict[sympy.Symbol, tuple[int, int]]]:
        inputs = [key for key in keys if isinstance(key, int) and self._arrives(key, index)]
        symbols = sorted((key for key in keys if isinstance(key, sympy.Symbol)), key=str)
        sizes = {}
        for symbol in symbols:
            sizes[symbol] = self._size_source(symbol, inputs)
            if sizes[symbol][0] not in inputs:
                inputs.append(sizes[symbol][0])
        if HERE in keys and not inputs and not self._has_parameters(keys):
            # The device is that of an input, or of a parameter.
            inputs.append(next(entry.value for entry in self.traced.inputs if entry.value is not None))
        return inputs, sizes

    def _has_parameters(self, keys: frozenset[Key]) -> bool:
        names = {name for name, _ in self.traced.model.named_parameters(remove_duplicate=False)}
        used = [self.traced.state_names.get(key, ()) for key in keys if isinstance(key, int)]
        return any(name in names for state in used for name in state)

    def _arrives(self, value: int, stage: int) -> bool:
        """Return True if a value comes from outside the stage, and is not part of its own state."""
        op = self.traced.operations[value]
        return op.kind == "input" or (op.kind == "op" and value in self.made_in and value not in self.made[stage])

    def _order(self, value: int) -> tuple[bool, int]:
        return (self.traced.operations[value].kind != "input", value)

    def _size_source(self, symbol: sympy.Symbol, inputs: Sequence[int]) -> tuple[int, int]:
        for value in sorted(inputs, key=self._order):
            spec = self.traced.operations[value].spec
            if spec is not None and symbol in spec.shape:
                return value, spec.shape.index(symbol)
        return self.traced.dims[symbol]

    def _edge(self, value: int, target: int) -> Edge | None:
        op = self.traced.operations[value]
        source = self._source(value, target)
        if op.kind == "input" and source is None:
            if target == 0:
                return None
            return Edge(value, self.names[value], "root input", 0, target, self.spec(value))
        assert source is not None
        return Edge(value, self.names[value], "activation", source, target, self.spec(value))

    def _source(self, value: int, target: int) -> int | None:
        """Return the stage that has a value as the target must see it: its last writer before, or its maker."""
        made = self.made_in.get(value)
        storage = self.traced.operations[value].storage
        later = [stage for stage in self.writers.get(storage, ()) if (made or 0) <= stage < target]
        if not later:
            return made
        if made is None or later[-1] > made:
            self._check_has(value, later[-1], target)
        return later[-1]

    def _check_has(self, value: int, writer: int, target: int) -> None:
        if value in used_by_items(self.programs[writer].items):
            return
        raise SplitError(
            f"{self._called(value)} is used in stage {target} after stage {writer} wrote to another view of it in "
            "place; between stages they are no longer the same memory. Cut elsewhere, or replace the in-place "
            "operation"
        )

    def _check_aliases(self, stage: int, inputs: Sequence[int]) -> None:
        by_storage: dict[int, int] = {}
        for value in inputs:
            storage = self.traced.operations[value].storage
            if storage is None or stage not in self.writers.get(storage, ()):
                continue
            if storage in by_storage:
                raise SplitError(
                    f"{self._called(value)} and {self._called(by_storage[storage])} are views of one tensor, both come "
                    f"into stage {stage}, and stage {stage} writes to one of them in place; between stages they are no "
                    "longer the same memory. Cut elsewhere, or replace the in-place operation"
                )
            by_storage[storage] = value

    def _called(self, value: int) -> str:
        op = self.traced.operations[value]
        return f"{self.names[value]} ({op.source})" if op.source else self.names[value]

    def _is_written_in(self, value: int, stage: int) -> bool:
        """Return True if a received activation is written to, so that it must be a copy of its own."""
        op = self.traced.operations[value]
        if op.kind == "input" and self._source(value, stage) is None:
            return False  # the model writes to its caller's tensor, as it does uncut
        return op.storage is not None and stage in self.writers.get(op.storage, ())

    def _writers(self) -> dict[int | None, list[int]]:
        """Return the stages that write to each memory, in order."""
        writers: dict[int | None, list[int]] = {}
        for op in self.traced.operations:
            for index in op.writes:
                stage = bisect.bisect_right(self.cuts, op.tick)
                stages = writers.setdefault(self.traced.operations[index].storage, [])
                if stage not in stages:
                    stages.append(stage)
        writers.pop(None, None)
        return writers


# A number that depends on the data travels as a tensor without dims.
NUMBER_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64, bool: torch.bool}


def _output_names(output: Template) -> dict[int, str]:
    """Name the values of an output by the ways that lead to them: `past_key_values.layers[0].keys`.

    >>> from pipecut.pipe_ir import Ref
    >>> _output_names(Template.of({"loss": Ref(3), "hidden": (Ref(1), Ref(2))}, lambda leaf: leaf))
    {3: 'loss', 1: 'hidden[0]', 2: 'hidden[1]'}
    """
    found: dict[int, str] = {}
    for leaf, name in _named_leaves(output):
        if isinstance(leaf, Ref):
            found.setdefault(leaf.index, name)
    return found


def _named_leaves(output: Template) -> Iterator[tuple[Any, str]]:
    """Yield the leaves of an output, each with its name."""
    for leaf, path in zip(output.leaves, output.structure.paths(), strict=True):
        yield leaf, re.sub(r"\['(\w+)'\]", r".\1", "".join(path)).lstrip(".")


def _spec(op: Operation, traced: TracedModel) -> TensorSpec:
    if op.number is not None:
        return TensorSpec((), NUMBER_DTYPES[op.number], ())
    if op.spec is None:
        raise SplitError(
            f"{op.name} is used in a later stage, and is neither a tensor nor a number"
            f"{f' ({op.source})' if op.source else ''}; cut before it, or after what takes it apart"
        )
    order = wire_order(op, traced)
    return (op.spec.permuted(order) if order else op.spec).contiguous()


def wire_order(op: Operation, traced: TracedModel) -> tuple[int, ...] | None:
    """Return the order of dims in which a value is sent; None for its own.

    What is sent lies in memory in order. A transposed activation is sent as it lies, and turned back by the receiver:
    a matrix product over another layout may round differently.
    """
    if op.kind == "input" or op.spec is None or op.spec.is_contiguous:
        return None
    return op.spec.memory_order(traced.hints)


# Outputs that training steps send to the last stage although it does not use them: those that are asked for.

Outputs: TypeAlias = str | Sequence[str | int]

ALL, USED = "all", "used"


@dataclass(frozen=True)
class RequestedOutputs:
    """Names of the outputs that are sent in any case; None for all of them."""

    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, outputs: Outputs) -> RequestedOutputs:
        """Read the `outputs` option of pipeline().

        >>> RequestedOutputs.of("used"), RequestedOutputs.of(["hidden_states", 1])
        (RequestedOutputs(names=()), RequestedOutputs(names=('hidden_states', '[1]')))
        """
        if isinstance(outputs, str):
            return cls({ALL: None, USED: ()}.get(outputs, (outputs,)))
        is_list = isinstance(outputs, list | tuple | set | frozenset)
        if not is_list or not all(type(name) in (str, int) for name in outputs):
            raise InputError(
                f'outputs must be "used", "all", or a list of names of outputs (numbers, for a tuple), got {outputs!r}'
            )
        return cls(tuple(f"[{name}]" if isinstance(name, int) else name for name in outputs))

    def check(self, traced: TracedModel) -> None:
        """Raise on a name that the model's output does not have."""
        known = [name for _, name in _named_leaves(traced.output)]
        for name in self.names or ():
            if not any(_is_part(each, name) for each in known):
                tops = dict.fromkeys(first_key(each).strip("'") for each in known)
                raise InputError(
                    f"outputs has {name!r}, and the output of {type(traced.model).__name__} has "
                    f"{listed(filter(None, tops)) or 'no names: it is one value'}"
                )

    def marked(self, traced: TracedModel) -> TracedModel:
        """Return a trace that knows the outputs which need not be sent. One number is always: it may be a loss."""
        if self.names is None:
            return traced
        leaves = [(leaf.index, name) for leaf, name in _named_leaves(traced.output) if isinstance(leaf, Ref)]
        asked = {index for index, name in leaves if any(_is_part(name, each) for each in self.names)}
        return replace(traced, optional_outputs=frozenset(i for i, _ in leaves if _has_dims(traced, i)) - asked)


def _is_part(name: str, whole: str) -> bool:
    """Return True if an output is the one with a name, or inside of it."""
    return name == whole or name.startswith((f"{whole}.", f"{whole}[")) or first_key(name) == repr(whole)


def _has_dims(traced: TracedModel, index: int) -> bool:
    spec = traced.operations[index].spec
    return spec is not None and len(spec.shape) > 0
