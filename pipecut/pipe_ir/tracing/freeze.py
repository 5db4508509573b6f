"""Conversion of the nodes and spans of a finished trace to a TracedModel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ...torch_internals import is_from_data, storage_id
from ..inputs import Example, active_autocast
from ..operators import Modes, is_mark, operator_of, returned_argument, written_arguments
from ..sizes.dynamic import same_sizes
from ..sizes.faults import find_conditions, find_fixed_dims
from ..sizes.symbols import SYMBOLIC, Symbols, hints_of, names_of
from ..traced import HERE, ConstantRef, Context, Operation, OperationKind, Ref, Size, Span, TracedInput, TracedModel
from .branches import is_check
from .recorder import Recorder
from .records import OpenSpan, RecordedNode, RecordedTensor, line_of


def freeze(model: nn.Module, example: Example, run: Recorder, training: bool) -> TracedModel:
    """Return all of a trace as frozen values, independent of the tracer."""
    return _Freezer(model, example, run, training).traced()


class _Freezer:
    """Conversion of one recorded run: ticks, spans, inputs and operations."""

    def __init__(self, model: nn.Module, example: Example, run: Recorder, training: bool) -> None:
        assert run.root is not None
        self.model, self.example, self.run, self.training = model, example, run, training
        self.root = run.root
        names = _input_names(example)
        values = [recorded.node.meta["val"] for recorded in run.inputs]
        dim_names = example.dynamic.names
        same = same_sizes(
            run.nodes,
            [recorded.node for recorded in run.inputs],
            hints_of(values, example.tensors),
            names_of(values, dim_names),
        )
        shapes = [tuple(tensor.shape) for tensor in example.tensors]
        inputs = list(zip(names, values, strict=True))
        self.symbols = Symbols(
            inputs, {**run.decisions.replacements, **same}, example.dynamic, shapes, run.decisions.made
        )
        self.device = _device(model, example)
        input_names = {recorded.node: name for recorded, name in zip(run.inputs, names, strict=True)}
        self.operations = _Operations(model, run, self.symbols, input_names, self.device)
        self.span_ticks: dict[int, tuple[int, int]] = {}
        self.span_contexts: dict[int, Context] = {}

    def traced(self) -> TracedModel:
        self._walk_timeline()
        root = self._span(self.root)
        output = self.run.output.converted(self.operations.leaf)
        operations, index = self.operations.finished(), self.operations.index
        input_values = [index[recorded.node] for recorded in self.run.inputs]
        inputs = self._inputs(input_values, operations)
        return TracedModel(
            operations=operations,
            root=root,
            inputs=inputs,
            signature=self.example.signature,
            output=output,
            dims={symbol: (input_values[at], dim) for symbol, (at, dim) in self.symbols.origin.items()},
            hints={
                str(symbol): self.example.tensors[at].shape[dim] for symbol, (at, dim) in self.symbols.origin.items()
            },
            state_names={index[node]: tuple(names) for node, names in self.operations.state.items() if node in index},
            device=self.device,
            model=self.model,
            training=self.training,
            conditions=find_conditions(self.run, self.symbols, operations, self.span_ticks),
            reached_state=frozenset(index[node] for node in self.operations.reached),
            mode_readers=frozenset(self.run.mode_readers),
            assigned_attributes=self.run.assigned_attributes,
            named_dims=tuple(sorted(self.symbols.named)),
            fixed_dims=find_fixed_dims(self.run, self.example.dynamic, inputs, input_values),
            autocast=active_autocast(),
            draws=tuple(self.run.draws),
            history=self.run.history.finish(),
        )

    def _walk_timeline(self) -> None:
        """Give every node, and every begin and end of a span, its tick."""
        pending = iter(_events(self.root))
        event = next(pending, None)
        tick = 0
        for position, node in enumerate(self.run.nodes):
            while event is not None and event[0] <= position:
                self._note_event(event, tick)
                tick, event = tick + 1, next(pending, None)
            self.operations.note(node, tick)
            tick += 1
        while event is not None:
            self._note_event(event, tick)
            tick, event = tick + 1, next(pending, None)

    def _note_event(self, event: tuple[int, OpenSpan, bool], tick: int) -> None:
        _, span, begins = event
        if begins:
            self.span_ticks[id(span)] = (tick, -1)
            self.span_contexts[id(span)] = self.operations.modes.context
        else:
            self.span_ticks[id(span)] = (self.span_ticks[id(span)][0], tick)
        for leaf in (span.args if begins else span.result).leaves:
            if isinstance(leaf, RecordedTensor):
                self.operations.correct(leaf)

    def _span(self, span: OpenSpan) -> Span:
        begin, end = self.span_ticks[id(span)]
        children = tuple(self._span(child) for child in span.children)
        return Span(
            kind=span.kind,
            path=span.path,
            nth_call=span.nth_call,
            begin=begin,
            end=end,
            args=span.args.converted(self.operations.leaf),
            result=span.result.converted(self.operations.leaf),
            context=self.span_contexts[id(span)],
            children=children,
            options=span.options,
            assigned_buffers={
                name: self.operations.index[recorded.node] for name, recorded in span.assigned_buffers.items()
            },
        )

    def _inputs(self, input_values: list[int], operations: tuple[Operation, ...]) -> tuple[TracedInput, ...]:
        order = [nth for nth, leaf in enumerate(self.example.leaves) if isinstance(leaf, torch.Tensor)]
        value_of = dict(zip(order, input_values, strict=True))
        return tuple(
            TracedInput(path, _identifier(path), value_of[nth], spec=operations[value_of[nth]].spec)
            if nth in value_of
            else TracedInput(path, _identifier(path), None, value)
            for path, nth, value in self.example.named
        )


_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclass
class _OpenOperation:
    """An operation that can still change: its value may be written to by later ones."""

    operation: Operation
    requires_grad: bool


class _Operations:
    """Operations of a trace while it is read, one for each node that stands for a value.

    `index` has the operation of each node, `numbers` the nodes that are sizes.

    `state` are the names of parameters and buffers by their nodes; those of `reached` were met past the traced copy.
    """

    def __init__(
        self, model: nn.Module, run: Recorder, symbols: Symbols, input_names: Mapping[Node, str], device: torch.device
    ) -> None:
        self.symbols = symbols
        self.index: dict[Node, int] = {}
        self.numbers: dict[Node, Any] = {}
        self.modes = Modes()
        self.state: dict[Node, list[str]] = {}
        for name, recorded in run.state:
            self.state.setdefault(recorded.node, []).append(name)
        self.reached: set[Node] = set()
        self._model = model
        self._model_tensors: dict[int, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._model_tensors.setdefault(id(tensor), []).append(name)
        self._constants = run.constants
        self._inputs = {recorded.node: recorded for recorded in run.inputs}
        self._input_names = input_names
        self._device = device
        self._all: list[_OpenOperation] = []
        self._made: dict[Node, Operation] = {}
        self._data_numbers: dict[Any, int] = {}
        self._checked = _checked_numbers(run.nodes)

    def finished(self) -> tuple[Operation, ...]:
        """Return the operations as they are in the end."""
        return tuple(map(_finished, self._all))

    def note(self, recorded: RecordedNode, tick: int) -> None:
        """Read the next node: a size, a change of modes, or an operation."""
        if isinstance(recorded.value, SYMBOLIC) and recorded.node not in self._checked:
            number = self.symbols.number(recorded.value)
            if number is not None:
                self.numbers[recorded.node] = number if isinstance(number, int) else Size(number)
                return
        if recorded.op == "placeholder" and recorded.node not in self.state and recorded.node not in self._inputs:
            return
        if recorded.op == "call_function" and self.modes.follow(recorded.target, recorded.args):
            return
        self._add(recorded, tick)

    def correct(self, recorded: RecordedTensor) -> None:
        """Correct in hindsight the flag of a tensor of which autograd itself said if it carries a gradient."""
        if recorded.node in self.index:
            self._all[self.index[recorded.node]].requires_grad = recorded.requires_grad

    def _add(self, recorded: RecordedNode, tick: int) -> None:
        kind, target, constant = self._kind(recorded)
        args = tuple(self._argument(item) for item in recorded.args)
        kwargs = {key: self._argument(item) for key, item in recorded.kwargs.items()}
        refs = _refs((args, kwargs))
        like = None if recorded.like is None else self._made.get(recorded.like)
        requires_grad = self._carries_gradient(recorded, kind, target, refs)
        op = Operation(
            index=len(self._all),
            tick=tick,
            kind=kind,
            name=self._input_names.get(recorded.node, recorded.node.name),
            target=target,
            args=args,
            kwargs=kwargs,
            spec=self.symbols.spec(recorded.value, requires_grad) if isinstance(recorded.value, torch.Tensor) else None,
            storage=self._storage(recorded, target, refs),
            context=self.modes.context,
            source=line_of(recorded.stack_trace) if like is None else like.source,
            refs=refs,
            writes=() if like is not None and not like.writes else _refs(written_arguments(target, args, kwargs)),
            constant=constant,
            number=_NUMBERS.get(type(recorded.value)),
            like=None if like is None else like.index,
        )
        self._made[recorded.node] = op
        self._all.append(_OpenOperation(op, requires_grad))
        self.index[recorded.node] = op.index
        if isinstance(recorded.value, SYMBOLIC):
            self._data_numbers[recorded.value.node.expr] = op.index
        same = returned_argument(target, args, kwargs)
        if isinstance(same, Ref):
            self._rewrite(recorded.node, same.index, op, requires_grad)

    def _storage(self, recorded: RecordedNode, target: Any, refs: tuple[int, ...]) -> int | None:
        if operator_of(target).passes_through and refs:
            return self._all[refs[0]].operation.storage
        return _storage(recorded.value) if recorded.memory is None else recorded.memory

    def _rewrite(self, node: Node, index: int, writer: Operation, requires_grad: bool) -> None:
        """Follow `y = x.add_(1)`: y is x, which from here on has the spec of the writer."""
        each = self._all[index]
        self.index[node] = index
        self._all[index] = _OpenOperation(replace(each.operation, spec=writer.spec), requires_grad)

    def _kind(self, recorded: RecordedNode) -> tuple[OperationKind, Any, Any]:
        if recorded.node in self.state:
            return "state", self.state[recorded.node][0], None
        if recorded.op == "placeholder":
            return "input", recorded.target, None
        if recorded.op == "get_attr":
            constant = getattr(self._constants, str(recorded.target))
            if id(constant) in self._model_tensors:
                self.state[recorded.node] = self._model_tensors[id(constant)]
                self.reached.add(recorded.node)
                return "state", self.state[recorded.node][0], None
            constant = _with_tuple_output(constant) if isinstance(constant, GraphModule) else constant
            return "constant", recorded.target, constant
        return ("mark" if is_mark(recorded.target) else "op"), recorded.target, None

    def _carries_gradient(
        self, recorded: RecordedNode, kind: OperationKind, target: Any, refs: tuple[int, ...]
    ) -> bool:
        if kind == "state":
            return bool(self._model_tensor(recorded.node).requires_grad)
        if kind == "input":
            return self._inputs[recorded.node].requires_grad
        from_arguments = any(self._all[index].requires_grad for index in refs)
        if not isinstance(recorded.value, torch.Tensor):
            return from_arguments and not isinstance(recorded.value, SYMBOLIC)
        differentiable = recorded.value.dtype.is_floating_point or recorded.value.dtype.is_complex
        if not (differentiable and self.modes.context.grad) or not operator_of(target).has_gradient:
            return False
        return from_arguments

    def _model_tensor(self, node: Node) -> torch.Tensor:
        path, _, name = self.state[node][0].rpartition(".")
        tensor: torch.Tensor = getattr(self._model.get_submodule(path), name)
        return tensor

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self.numbers[value] if value in self.numbers else self._ref(self.index[value])
        if isinstance(value, tuple | list):
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(item) for item in (value.start, value.stop, value.step)))
        return HERE if isinstance(value, torch.device) and value == self._device else value

    def _ref(self, index: int) -> Ref:
        op = self._all[index].operation
        outside = op.kind == "constant" and isinstance(op.constant, torch.Tensor)
        return ConstantRef(index) if outside else Ref(index)

    def leaf(self, leaf: Any) -> Any:
        """Return a value in the arguments or results of a call in terms of operations."""
        if isinstance(leaf, RecordedTensor):
            return self._ref(self.index[leaf.node])
        if isinstance(leaf, SYMBOLIC):
            number = self.symbols.number(leaf)
            return (
                number
                if isinstance(number, int)
                else Size(number)
                if number is not None
                else Ref(self._data_numbers[leaf.node.expr])
            )
        if isinstance(leaf, torch.Tensor):
            return self._constant(leaf)
        return self._argument(leaf)

    def _constant(self, tensor: torch.Tensor) -> Ref:
        """Add a tensor that the model keeps as a plain attribute and passes on."""
        index = len(self._all)
        spec = self.symbols.spec(tensor, tensor.requires_grad)
        name = f"constant_{index}"
        op = Operation(index, -1, "constant", name, name, (), {}, spec, None, Context(), "", (), constant=tensor)
        self._all.append(_OpenOperation(op, tensor.requires_grad))
        return ConstantRef(index)


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    try:
        return storage_id(value)
    except NotImplementedError:  # inside torch.vmap tensors are views that have no memory to speak of
        return None


def _with_tuple_output(graph_module: GraphModule) -> GraphModule:
    """Let a branch of torch.cond return a tuple, as it does at run time, also if it was traced with a single tensor."""
    output = graph_module.graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        output.args = ((output.args[0],),)
        graph_module.recompile()
    return graph_module


def _refs(value: Any) -> tuple[int, ...]:
    if isinstance(value, Ref):
        return (value.index,)
    if isinstance(value, tuple | list):
        return tuple(index for item in value for index in _refs(item))
    if isinstance(value, dict):
        return _refs(list(value.values()))
    if isinstance(value, slice):
        return _refs([value.start, value.stop, value.step])
    return ()


def _finished(each: _OpenOperation) -> Operation:
    operation, spec = each.operation, each.operation.spec
    if spec is None or spec.requires_grad is each.requires_grad:
        return operation
    return replace(operation, spec=replace(spec, requires_grad=each.requires_grad))


def _events(span: OpenSpan) -> Iterator[tuple[int, OpenSpan, bool]]:
    yield span.begin, span, True
    for child in span.children:
        yield from _events(child)
    yield span.end, span, False


def _input_names(example: Example) -> list[str]:
    by_leaf = {nth: path for path, nth, _ in example.named if nth is not None}
    return [_identifier(by_leaf[nth]) for nth, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor)]


def _identifier(path: str) -> str:
    return re.sub(r"\W+", "_", path).strip("_") or "input"


def _device(model: nn.Module, example: Example) -> torch.device:
    state = (*model.parameters(), *model.buffers())
    if any(tensor.device.type == "meta" for tensor in state):
        return torch.device("cpu")  # the device of the stand-ins that a model without memory is traced with
    return next((tensor.device for tensor in (*example.tensors, *state)), torch.device("cpu"))


def _checked_numbers(nodes: Sequence[RecordedNode]) -> set[Node]:
    """Return the numbers from data that a check of the model's own needs, though what it checks is known since."""
    found: set[Node] = set()
    for each in reversed(nodes):
        if each.node in found or (each.op == "call_function" and is_check(each.target)):
            numbers = (node for node in each.node.all_input_nodes if isinstance(node.meta.get("val"), SYMBOLIC))
            found |= {node for node in numbers if is_from_data(node.meta["val"])}
    return found
