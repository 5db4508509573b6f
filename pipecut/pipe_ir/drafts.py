"""The steps of a trace while it is read: each can still change, as long as operations in place are to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .effects import PASS_THROUGH, WITHOUT_GRADIENT, Modes, operator_name, returned_argument, written_arguments
from .marker import is_mark
from .recorder import Recorder
from .seen import SeenNode, SeenTensor
from .symbols import SYMBOLIC, Symbols
from .traced import HERE, ConstantRef, Context, Ref, Size, Step, StepKind
from .user_line import line_of


@dataclass
class _Draft:
    """A value while its last writer is not known yet."""

    step: Step
    requires_grad: bool


class Drafts:
    """Steps, one for each node that stands for a value; `index` says which, `numbers` has the nodes that are sizes.

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
        for name, seen in run.state:
            self.state.setdefault(seen.node, []).append(name)
        self.reached: set[Node] = set()
        self._model = model
        self._model_tensors: dict[int, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._model_tensors.setdefault(id(tensor), []).append(name)
        self._constants = run.constants
        self._inputs = {seen.node: seen for seen in run.inputs}
        self._input_names = input_names
        self._device = device
        self._drafts: list[_Draft] = []
        self._data_numbers: dict[Any, int] = {}

    def finished(self) -> tuple[Step, ...]:
        """The steps as they are in the end."""
        return tuple(replace(draft.step, spec=_with_grad(draft)) for draft in self._drafts)

    def note(self, seen: SeenNode, tick: int) -> None:
        """The next node: a size, a change of modes, or a step."""
        if isinstance(seen.value, SYMBOLIC):
            number = self.symbols.number(seen.value)
            if number is not None:
                self.numbers[seen.node] = number if isinstance(number, int) else Size(number)
                return
        if seen.op == "placeholder" and seen.node not in self.state and seen.node not in self._inputs:
            return
        if seen.op == "call_function" and self.modes.follow(seen.target, seen.args):
            return
        self._add(seen, tick)

    def correct(self, seen: SeenTensor) -> None:
        """In hindsight only: autograd itself said whether this tensor carries a gradient."""
        if seen.node in self.index:
            self._drafts[self.index[seen.node]].requires_grad = seen.requires_grad

    def _add(self, seen: SeenNode, tick: int) -> None:
        kind, target, constant = self._kind(seen)
        args = tuple(self._argument(item) for item in seen.args)
        kwargs = {key: self._argument(item) for key, item in seen.kwargs.items()}
        refs = _refs((args, kwargs))
        requires_grad = self._carries_gradient(seen, kind, target, refs)
        step = Step(
            index=len(self._drafts),
            tick=tick,
            kind=kind,
            name=self._input_names.get(seen.node, seen.node.name),
            target=target,
            args=args,
            kwargs=kwargs,
            spec=self.symbols.spec(seen.value, requires_grad) if isinstance(seen.value, torch.Tensor) else None,
            storage=self._storage(seen, target, refs),
            context=self.modes.context,
            source=line_of(seen.stack_trace),
            refs=refs,
            writes=_refs(written_arguments(target, args, kwargs)),
            constant=constant,
        )
        self._drafts.append(_Draft(step, requires_grad))
        self.index[seen.node] = step.index
        if isinstance(seen.value, SYMBOLIC):
            self._data_numbers[seen.value.node.expr] = step.index
        same = returned_argument(target, args, kwargs)
        if isinstance(same, Ref):
            self._rewrite(seen.node, same.index, step, requires_grad)

    def _storage(self, seen: SeenNode, target: Any, refs: tuple[int, ...]) -> int | None:
        if operator_name(target) in PASS_THROUGH and refs:
            return self._drafts[refs[0]].step.storage
        return _storage(seen.value)

    def _rewrite(self, node: Node, index: int, writer: Step, requires_grad: bool) -> None:
        """`y = x.add_(1)`: y is x, which from here on is what the writer made of it."""
        draft = self._drafts[index]
        self.index[node] = index
        self._drafts[index] = _Draft(replace(draft.step, spec=writer.spec), requires_grad)

    def _kind(self, seen: SeenNode) -> tuple[StepKind, Any, Any]:
        if seen.node in self.state:
            return "state", self.state[seen.node][0], None
        if seen.op == "placeholder":
            return "input", seen.target, None
        if seen.op == "get_attr":
            constant = getattr(self._constants, str(seen.target))
            if id(constant) in self._model_tensors:
                self.state[seen.node] = self._model_tensors[id(constant)]
                self.reached.add(seen.node)
                return "state", self.state[seen.node][0], None
            constant = _with_tuple_output(constant) if isinstance(constant, GraphModule) else constant
            return "constant", seen.target, constant
        return ("mark" if is_mark(seen.target) else "op"), seen.target, None

    def _carries_gradient(self, seen: SeenNode, kind: StepKind, target: Any, refs: tuple[int, ...]) -> bool:
        if kind == "state":
            return bool(self._model_tensor(seen.node).requires_grad)
        if kind == "input":
            return self._inputs[seen.node].requires_grad
        from_arguments = any(self._drafts[index].requires_grad for index in refs)
        if not isinstance(seen.value, torch.Tensor):
            return from_arguments
        differentiable = seen.value.dtype.is_floating_point or seen.value.dtype.is_complex
        if not (differentiable and self.modes.context.grad) or operator_name(target) in WITHOUT_GRADIENT:
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
        step = self._drafts[index].step
        outside = step.kind == "constant" and isinstance(step.constant, torch.Tensor)
        return ConstantRef(index) if outside else Ref(index)

    def leaf(self, leaf: Any) -> Any:
        """What a value in the arguments or results of a call is in terms of steps."""
        if isinstance(leaf, SeenTensor):
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
        """A tensor that the model keeps as a plain attribute and passes on."""
        index = len(self._drafts)
        spec = self.symbols.spec(tensor, tensor.requires_grad)
        name = f"constant_{index}"
        step = Step(index, -1, "constant", name, name, (), {}, spec, None, Context(), "", (), constant=tensor)
        self._drafts.append(_Draft(step, tensor.requires_grad))
        return ConstantRef(index)


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # inside torch.vmap tensors are views that have no memory to speak of
        return None


def _with_tuple_output(graph_module: GraphModule) -> GraphModule:
    """A branch of torch.cond returns a tuple when it runs, also where it was traced returning a single tensor."""
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


def _with_grad(draft: _Draft) -> Any:
    spec = draft.step.spec
    return None if spec is None else replace(spec, requires_grad=draft.requires_grad)
