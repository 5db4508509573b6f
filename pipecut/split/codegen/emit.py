"""Python source of a stage's pieces: plain code, no node-by-node interpreter at run time."""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.utils.checkpoint

from ...errors import PipeError
from ...pipe_ir import HERE, Context, ForwardOf, ModuleRef, Opaque, Operation, Ref, Size, Span, Template
from ...torch_internals import is_higher_order
from ..modes import ModeDifferences, require_gradients, require_mode
from ..program import (
    BufferUpdate,
    Checkpointed,
    FunctionCall,
    Item,
    Key,
    Piece,
    WholeCall,
    defined_by,
    require_shape,
    used_by_items,
    walk,
)
from .expressions import Expressions, Naming, is_plain_name


@dataclass(frozen=True)
class Function:
    """The generated forward of one piece: its source, and the expressions' view of what it refers to."""

    piece: Piece
    source: str
    refers_to: Expressions

    @property
    def label(self) -> str:
        return self.piece.path if self.piece.nth_call == 0 else f"{self.piece.path}#{self.piece.nth_call}"


# The values that a stage sends, each with the code that makes it fit to be sent, as a format of its name.
_Sent: TypeAlias = Mapping[int, str]


class Emitter:
    """Emitter of the functions of one stage."""

    def __init__(self, naming: Naming, modes: ModeDifferences, stage: int, variant: int = 0) -> None:
        self.naming = naming
        self.variant = variant
        self.modes = modes
        self.stage_index = stage
        self.functions: list[Function] = []
        self.shared_paths: frozenset[str] = frozenset()

    def stage(
        self, program: Piece, inputs: Sequence[int], prologue: Sequence[str], returns: _Sent | Template
    ) -> list[Function]:
        """Return the functions of a stage; the last one is the stage's own forward."""
        self.shared_paths = _paths_with_several_forwards(program)
        names = self.naming.values
        writer = _Writer(self, program)
        writer.lines += prologue
        writer.items(program.items, set(returns.refs if isinstance(returns, Template) else returns))
        if isinstance(returns, Template):
            writer.lines.append(f"return {writer.write.template(returns)}")
        elif returns:
            writer.lines.append(f"return {', '.join(code.format(names[key]) for key, code in returns.items())}")
        self.functions.append(writer.finish([names[index] for index in inputs]))
        return self.functions

    def piece(self, piece: Piece, wanted: set[Key]) -> tuple[list[str], list[str]]:
        """Emit a nested piece; return the names that it takes and gives."""
        naming = self.naming
        outside = (key for key in used_by_items(piece.items) if not naming.is_state(key))
        takes = [naming.name(key) for key in sorted(outside, key=naming.order)]
        made = sorted((key for key in defined_by(piece) if key in wanted), key=naming.order)
        gives = [naming.name(key) for key in made]
        writer = _Writer(self, piece)
        writer.items(piece.items, set(made))
        if gives:
            writer.lines.append(f"return {', '.join(gives)}")
        self.functions.append(writer.finish(takes))
        return takes, gives


class _Writer:
    """Writer of the body of one function."""

    def __init__(self, emitter: Emitter, piece: Piece) -> None:
        self.emitter = emitter
        self.piece = piece
        self.names = emitter.naming.values
        self.write = Expressions(emitter.naming, piece.path)
        self.lines: list[str] = []
        # A checkpointed function runs again in backward: what it uses has to stay.
        regions = (item for item in walk(piece.items) if isinstance(item, Checkpointed))
        self.captured = {key for region in regions for key in used_by_items((region,))}
        training = emitter.modes.bound.get((emitter.stage_index, piece.path, piece.nth_call))
        if training is not None:
            self.lines.append(f"{self.write.shared('require_mode', require_mode)}(self, {training}, {piece.path!r})")
        if piece.path in emitter.modes.only_with_gradients:
            self.lines.append(f"{self.write.shared('require_gradients', require_gradients)}({piece.path!r})")

    def finish(self, parameters: Sequence[str]) -> Function:
        if len(self.lines) > 1 and self.lines[-2].startswith("del "):
            del self.lines[-2]  # the function ends anyway
        header = f"def forward({', '.join(('self', *parameters))}):"
        source = "\n".join([header, *(f"    {line}" for line in self.lines or ["pass"])]) + "\n"
        return Function(self.piece, source, self.write)

    def items(self, items: Sequence[Item], wanted: set[Key], base: Context | None = None) -> None:
        """Write items in order, each in the modes that it was traced in."""
        pairs = list(zip(items, _needed_after(items, wanted), strict=True))
        self._in_modes(pairs, base or self.piece.context)

    def _in_modes(self, pairs: Iterable[tuple[Item, set[Key]]], base: Context) -> None:
        """Write items into `with` blocks where their modes differ from those around."""
        for context, group in itertools.groupby(pairs, key=lambda pair: _one_level_in(pair[0].context, base)):
            if context == base:
                for item, needed in group:
                    _WRITE[type(item)](self, item, needed)
                    self._forget(item, needed)
                continue
            with self._block(f"with {_manager(context, base)}:"):
                self._in_modes(group, context)

    def _forget(self, item: Item, needed: set[Key]) -> None:
        """Let go of values after their last use, as Python code that names them once would."""
        used = (key for key in used_by_items((item,)) - needed if isinstance(key, int) and key not in self.captured)
        names = [self.names[key] for key in sorted(used) if not self.emitter.naming.is_state(key)]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    @contextlib.contextmanager
    def _block(self, header: str) -> Iterator[None]:
        outer, self.lines = self.lines, []
        yield
        outer += [header, *(f"    {line}" for line in self.lines)]
        self.lines = outer

    def operation(self, item: Operation, needed: set[Key]) -> None:
        text = self._call_text(item)
        self.lines.append(f"{self.names[item.index]} = {text}" if item.index in needed else text)

    def _call_text(self, op: Operation) -> str:
        args, kwargs = self.emitter.modes.arguments_of(op)
        texts = [*map(self.write.value, args), *(f"{key}={self.write.value(value)}" for key, value in kwargs.items())]
        if getattr(op.target, "__name__", "") == "getitem":
            return f"{texts[0]}[{texts[1]}]"
        call = f"{self.write.operator(op.target)}({', '.join(texts)})"
        # The branches of higher-order operators return tuples, also of one tensor.
        single = is_higher_order(op.target) and op.spec is not None
        return f"{call}[0]" if single else call

    def whole_call(self, item: WholeCall, needed: set[Key]) -> None:
        call = self._call(self.write.module(item.span.path), item.span)
        self._bind_result(item.span, call, item.makes & needed)
        for index, shape in item.shapes:
            if index in needed:
                check = self.write.shared("require_shape", require_shape)
                self.lines.append(f"{check}({self.names[index]}, {self.write.value(shape)}, {item.span.label!r})")

    def function_call(self, item: FunctionCall, needed: set[Key]) -> None:
        cls = item.span.options["function"]
        call = self._call(f"{self.write.shared(cls.__name__, cls)}.apply", item.span)
        self._bind_result(item.span, call, item.makes & needed)

    def _call(self, callee: str, span: Span) -> str:
        args, kwargs = span.args.structure.children
        leaves = iter(span.args.leaves)
        positional = [self.write.structured(child, leaves) for child in args.children]
        named = [
            f"{key[2:-2]}={self.write.structured(child, leaves)}"
            for key, child in zip(kwargs.keys, kwargs.children, strict=True)
        ]
        return f"{callee}({', '.join(positional + named)})"

    def _bind_result(self, span: Span, call: str, needed: frozenset[Key]) -> None:
        """Name the values that a call returns, by their paths in what it returns."""
        structure = span.result.structure
        leaves = list(zip(span.result.leaves, structure.paths(), strict=True))
        fixed = [
            (leaf, path)
            for leaf, path in leaves
            if leaf is not HERE and not isinstance(leaf, Ref | Size | ModuleRef | Opaque)
        ]
        if structure.rebuild is None and not fixed:
            self.lines.append(f"{self.names[span.result.refs[0]]} = {call}" if needed else call)
            return
        if structure.kind in ("tuple", "list"):
            check = self.write.shared("require_items", _require_items)
            tensors = [path[0][1:-1] for leaf, path in leaves if isinstance(leaf, Ref) and len(path) == 1]
            shape = f"{structure.kind}, {len(structure.children)}, ({''.join(f'{index}, ' for index in tensors)})"
            call = f"{check}({call}, {shape}, {span.label!r})"
        whole = f"result_of_{re.sub(r'[^0-9a-zA-Z]+', '_', span.label)}_{span.begin}"
        self.lines.append(f"{whole} = {call}")
        for leaf, path in fixed:
            check = self.write.shared("require_same", _require_same)
            self.lines.append(f"{check}({whole}{''.join(path)}, {self.write.value(leaf)}, {span.label!r})")
        for leaf, path in leaves:
            if isinstance(leaf, Ref) and leaf.index in needed:
                self.lines.append(f"{self.names[leaf.index]} = {whole}{''.join(path)}")
        self.lines.append(f"del {whole}")

    def checkpointed(self, item: Checkpointed, needed: set[Key]) -> None:
        takes = sorted({index for index in item.span.args.refs if not self.emitter.naming.is_state(index)})
        gives = sorted(index for index in defined_by(item) if index in needed)
        parameters = ", ".join(self.names[index] for index in takes)
        name = f"checkpointed_{item.span.begin}"
        with self._block(f"def {name}({parameters}):"):
            self.items(item.body, set(gives), item.span.context)
            self.lines.append(f"return ({''.join(f'{self.names[index]}, ' for index in gives)})")
        checkpoint = self.write.shared("checkpoint", torch.utils.checkpoint.checkpoint)
        options = ", ".join(f"{key}={self.write.value(value)}" for key, value in item.span.options.items())
        call = f"{checkpoint}({', '.join(filter(None, [name, parameters, options]))})"
        targets = "".join(f"{self.names[index]}, " for index in gives)
        self.lines.append(f"({targets}) = {call}" if gives else call)

    def buffer_update(self, item: BufferUpdate, needed: set[Key]) -> None:
        module, value = self.write.module(item.path), self.write.reference(item.value)
        plain = is_plain_name(item.name)
        self.lines.append(f"{module}.{item.name} = {value}" if plain else f"setattr({module}, {item.name!r}, {value})")

    def nested_piece(self, item: Piece, needed: set[Key]) -> None:
        takes, gives = self.emitter.piece(item, needed)
        variant, which = self.emitter.variant, []
        if variant:
            key = ForwardOf(variant, item.nth_call)
            which = [self.write.shared(f"forward_{item.nth_call}_of_variant_{variant}", key)]
        elif item.path in self.emitter.shared_paths:
            which = [str(item.nth_call)]
        call = f"{self.write.module(item.path)}({', '.join(which + takes)})"
        self.lines.append(f"{', '.join(gives)} = {call}" if gives else call)


_WRITE: dict[type, Callable[[_Writer, Any, set[Key]], None]] = {
    Operation: _Writer.operation,
    WholeCall: _Writer.whole_call,
    FunctionCall: _Writer.function_call,
    Checkpointed: _Writer.checkpointed,
    BufferUpdate: _Writer.buffer_update,
    Piece: _Writer.nested_piece,
}


def _needed_after(items: Sequence[Item], wanted: set[Key]) -> list[set[Key]]:
    """Return for each item the values that are still needed once it has run."""
    needed = set(wanted)
    result: list[set[Key]] = []
    for item in reversed(items):
        result.append(set(needed))
        needed |= used_by_items((item,))
    return result[::-1]


def _paths_with_several_forwards(program: Piece) -> frozenset[str]:
    """Return the modules of which more than one piece runs in this stage."""
    pieces = collections.Counter(item.path for item in walk(program.items) if isinstance(item, Piece))
    return frozenset(path for path, count in pieces.items() if count > 1)


def _one_level_in(context: Context, base: Context) -> Context:
    """Return the modes one `with` block further in on the way from `base` to `context`."""
    depth = len(base.autocast)
    if len(context.autocast) > depth:
        return replace(base, autocast=context.autocast[: depth + 1])
    return replace(base, grad=context.grad)


def _manager(context: Context, base: Context) -> str:
    """Return the context manager that switches from the modes of `base` to those of `context`, one level further in."""
    if context.grad != base.grad:
        return f"torch.set_grad_enabled({context.grad})"
    entered = context.autocast[-1]
    return f"torch.autocast({entered.device_type!r}, {entered.dtype}, {entered.enabled})"


# Checks that generated code calls: a module returns what it returned when it was traced.


def _require_items(
    result: Any, kind: type[list[Any]] | type[tuple[Any, ...]], count: int, tensors: tuple[int, ...], label: str
) -> Any:
    """Raise if a list or tuple has other items than in the trace, or tensors in other places."""
    if type(result) is kind and len(result) == count and all(result[index] is not None for index in tensors):
        return result
    expected = f"a {kind.__name__} of {count} with a tensor at {', '.join(map(str, tensors))}"
    got = f"({', '.join(map(_brief, result))})" if isinstance(result, tuple | list) else _brief(result)
    raise PipeError(
        f"{label!r} returned {expected} when the model was traced, and now {got}; "
        "a module that returns something else in another mode or after its hooks needs a new pipeline() call"
    )


def _require_same(result: Any, traced: Any, label: str) -> None:
    """Raise if a module returns other plain values than in the trace: they are part of it."""
    if result is not traced and not (type(result) is type(traced) and result == traced):
        raise PipeError(
            f"{label!r} returned {traced!r} when the model was traced, and now {_brief(result)}; the code around it "
            "was traced with that value. Return it as a tensor, or call pipeline() again in the mode that is to run"
        )


def _brief(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
