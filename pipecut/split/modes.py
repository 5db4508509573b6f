"""train() and eval() for generated code: what a forward does in one mode, laid over what it does in the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..errors import PipeError, warn
from ..pipe_ir import Operation, Ref, TracedModel
from ..torch_internals import is_overload, schema_of
from .program import BufferUpdate, Checkpointed, FunctionCall, Item, Piece, WholeCall, walk
from .state import written_state

_NUMBERS = (bool, int, float)
_PieceKey = tuple[int, str, int]


@dataclass(frozen=True)
class Switch:
    """An argument with a value for training and one for evaluation."""

    training: Any
    evaluation: Any


@dataclass(frozen=True)
class ModeDifferences:
    """Generated code in the two modes.

    `switches` are arguments that follow the mode, by operation and the argument's name; `bound` are pieces, by stage,
    path and number of the call, that fit one mode only. `written_in_other` are the parameters and buffers that the
    other mode updates; None where nobody has looked. `only_with_gradients` are modules that do something else without.
    """

    switches: Mapping[int, Mapping[str, Switch]] = field(default_factory=dict)
    bound: Mapping[_PieceKey, bool] = field(default_factory=dict)
    written_in_other: frozenset[str] | None = None
    only_with_gradients: frozenset[str] = frozenset()

    def bound_to(self, programs: Sequence[Piece], paths: Collection[str], training: bool) -> ModeDifferences:
        """Return the same, with the pieces of some modules bound to a mode."""
        pieces = ((stage, item) for stage, program in enumerate(programs) for item in walk((program,)))
        bound = {
            (stage, item.path, item.nth_call): training
            for stage, item in pieces
            if isinstance(item, Piece) and item.path in paths
        }
        return replace(self, bound={**self.bound, **bound})

    def arguments_of(self, op: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an operation's arguments, with Switches where they follow the mode."""
        mine = dict(self.switches.get(op.index, {}))
        names = list(_named_arguments(op))
        args = tuple(mine.pop(name, value) for name, value in zip(names, op.args, strict=False))
        return args, {**op.kwargs, **mine}


def compare_modes(
    here: TracedModel, programs_here: Sequence[Piece], there: TracedModel, programs_there: Sequence[Piece]
) -> ModeDifferences:
    """Find what differs between a model traced in its own mode (here) and in the other one (there)."""
    matcher = _Matcher(here, there)
    written = frozenset(written_state(there))
    if len(programs_here) != len(programs_there):
        bound = {(stage, "", 0): here.training for stage in range(len(programs_here))}
        return ModeDifferences({}, bound, written)
    for stage, (mine, theirs) in enumerate(zip(programs_here, programs_there, strict=True)):
        matcher.match_piece(stage, mine, theirs)
    if not matcher.match_output():
        matcher.bound[len(programs_here) - 1, "", 0] = here.model.training
    if matcher.checkpoints_missing:
        warn(
            f"{type(here.model).__name__} checkpoints activations in training mode only, and is cut in evaluation "
            "mode; call model.train() before pipeline() to keep the checkpoints"
        )
    return ModeDifferences(matcher.switches, matcher.bound, written)


class _Matcher:
    def __init__(self, here: TracedModel, there: TracedModel) -> None:
        self.here, self.there = here, there
        self.same: dict[int, int] = {}
        self.switches: dict[int, dict[str, Switch]] = {}
        self.bound: dict[_PieceKey, bool] = {}
        self.checkpoints_missing = False
        names = {name: index for index, names in there.state_names.items() for name in names}
        for index, own_names in here.state_names.items():
            self.same[index] = names.get(own_names[0], -1)
        for mine, theirs in zip(here.inputs, there.inputs, strict=True):
            if mine.value is not None and theirs.value is not None:
                self.same[mine.value] = theirs.value

    def match_piece(self, stage: int, mine: Piece, theirs: Piece) -> bool:
        if mine.path == theirs.path and self._items(
            stage, self._flat(mine.items, True), self._flat(theirs.items, False)
        ):
            return True
        self.bound[stage, mine.path, mine.nth_call] = self.here.model.get_submodule(mine.path).training
        return False

    def match_output(self) -> bool:
        """Return True if the model returns the same in both modes."""
        mine, theirs = self.here.output, self.there.output
        if list(mine.structure.paths()) != list(theirs.structure.paths()):
            return False
        return all(map(self._equal, mine.leaves, theirs.leaves))

    def _flat(self, items: Sequence[Item], mine: bool) -> list[Item]:
        """Put checkpointed items in line: whether a part is checkpointed does not change its values."""
        flat: list[Item] = []
        for item in items:
            if isinstance(item, Checkpointed):
                self.checkpoints_missing |= not mine and not any(self.here.spans("checkpoint"))
                flat += self._flat(item.body, mine)
            else:
                flat.append(item)
        return flat

    def _items(self, stage: int, mine: Sequence[Item], theirs: Sequence[Item]) -> bool:
        if len(mine) != len(theirs):
            return False
        for own, other in zip(mine, theirs, strict=True):
            if isinstance(own, Piece) and isinstance(other, Piece):
                if not self.match_piece(stage, own, other):
                    return False
            elif not self._item(own, other):
                return False
        return True

    def _item(self, mine: Item, theirs: Item) -> bool:
        if isinstance(mine, Operation) and isinstance(theirs, Operation):
            return self._operation(mine, theirs)
        if isinstance(mine, BufferUpdate) and isinstance(theirs, BufferUpdate):
            return (mine.path, mine.name, self.same.get(mine.value)) == (theirs.path, theirs.name, theirs.value)
        if isinstance(mine, WholeCall | FunctionCall) and type(mine) is type(theirs):
            return self._call(mine, theirs)
        return False

    def _call(self, mine: WholeCall | FunctionCall, theirs: WholeCall | FunctionCall) -> bool:
        if mine.span.label != theirs.span.label or mine.span.options != theirs.span.options:
            return False
        pairs = (mine.span.args.leaves, theirs.span.args.leaves), (mine.span.result.leaves, theirs.span.result.leaves)
        if any(len(own) != len(other) for own, other in pairs) or not mine.context.is_like(theirs.context):
            return False
        for own, other in zip(*pairs[1], strict=True):
            if isinstance(own, Ref) and isinstance(other, Ref):
                self.same.setdefault(own.index, other.index)
        return all(self._equal(own, other) for own, other in zip(*pairs[0], strict=True))

    def _operation(self, mine: Operation, theirs: Operation) -> bool:
        if mine.target != theirs.target or not mine.context.is_like(theirs.context):
            return False
        self.same[mine.index] = theirs.index
        own, other = _named_arguments(mine), _named_arguments(theirs)
        for name, value in own.items():
            if not self._equal(value, other[name]):
                if not (isinstance(value, _NUMBERS) and isinstance(other[name], _NUMBERS)):
                    return False
                pair = (value, other[name]) if self.here.training else (other[name], value)
                self.switches.setdefault(mine.index, {})[name] = Switch(*pair)
        return True

    def _equal(self, mine: Any, theirs: Any) -> bool:
        if isinstance(mine, Ref) and isinstance(theirs, Ref):
            own, other = self.here.operations[mine.index], self.there.operations[theirs.index]
            if own.kind == other.kind == "constant":
                return _same_constant(own.constant, other.constant)
            return self.same.get(mine.index) == theirs.index
        if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
            return len(mine) == len(theirs) and all(map(self._equal, mine, theirs))
        return type(mine) is type(theirs) and bool(mine == theirs)


def _same_constant(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, GraphModule) and isinstance(theirs, GraphModule):
        return mine.code == theirs.code
    return mine is theirs


def _named_arguments(op: Operation) -> dict[str, Any]:
    """Return the arguments of an operation by name, defaults included; by position where there is no schema."""
    if not is_overload(op.target):
        return {**{str(position): value for position, value in enumerate(op.args)}, **op.kwargs}
    schema = schema_of(op.target).arguments
    given = {argument.name: value for argument, value in zip(schema, op.args, strict=False)}
    return {**{argument.name: argument.default_value for argument in schema}, **given, **op.kwargs}


def require_mode(module: nn.Module, training: bool, path: str) -> None:
    """Raise in the other mode; generated code that fits one mode only calls this."""
    if module.training is not training:
        names = {True: "training", False: "evaluation"}
        raise PipeError(
            f"{type(module).__name__} ({path or 'the model itself'}) was cut in {names[training]} mode, and its "
            f"forward does other operations in {names[module.training]} mode; for that mode call pipeline() again "
            f"after model.{'train' if module.training else 'eval'}()"
        )


def require_gradients(path: str) -> None:
    """Raise under torch.no_grad(); generated code whose forward does something else there calls this."""
    if not torch.is_grad_enabled():
        raise PipeError(
            f"the forward of {path or 'the model itself'} does other operations under torch.no_grad() than with "
            "gradients, and is cut as it is with gradients; run it under torch.enable_grad(), or move the lines that "
            "ask for it (requires_grad, torch.is_grad_enabled()) into a module that is not cut"
        )
