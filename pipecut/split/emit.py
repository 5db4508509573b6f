"""Writes the Python source of a stage's pieces: plain code, no node-by-node interpreter at run time."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils.checkpoint
from torch.utils._sympy.printers import PythonPrinter

from ..errors import PipeError
from ..pipe_ir.structure import Structure
from ..pipe_ir.traced import HERE, Context, ModuleRef, Ref, Size, Span, Step, Template, TracedModel
from .modes import Modes, Switch, require_mode
from .program import (
    BufferUpdate,
    Checkpointed,
    FunctionCall,
    Item,
    Key,
    Operation,
    Piece,
    WholeCall,
    defined_by,
    used_by_items,
    walk,
)
from .state import state_name

_printer = PythonPrinter()


@dataclass
class Function:
    """The generated forward of one piece: its source, and what the source refers to."""

    path: str
    nth_call: int
    parameters: tuple[str, ...]
    source: str
    globals: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.path if self.nth_call == 0 else f"{self.path}#{self.nth_call}"


@dataclass(frozen=True)
class Paths:
    """Where things are in the model: the aliases of module paths, and of state names."""

    module_aliases: Mapping[str, tuple[str, ...]]

    def best(self, path: str, base: str) -> str:
        """The alias of a module path that lies below `base`, if there is one."""
        inside = (alias for alias in self.module_aliases.get(path, (path,)) if _is_below(alias, base))
        return next(inside, path)


def _is_below(path: str, base: str) -> bool:
    return base == "" or path == base or path.startswith(f"{base}.")


class Emitter:
    """Emits the functions of one stage."""

    def __init__(
        self,
        traced: TracedModel,
        names: Mapping[int, str],
        paths: Paths,
        modes: Modes,
        stage: int,
    ) -> None:
        self.traced = traced
        self.names = names
        self.paths = paths
        self.modes = modes
        self.stage_index = stage
        self.functions: list[Function] = []
        self.shared_paths: frozenset[str] = frozenset()

    def stage(
        self,
        program: Piece,
        inputs: Sequence[int],
        prologue: Sequence[str],
        returns: Sequence[Key] | Template,
    ) -> list[Function]:
        """The functions of a stage; the last one is the stage's own forward."""
        self.shared_paths = _paths_with_several_forwards(program)
        writer = _Writer(self, program, [self.names[index] for index in inputs])
        writer.lines += prologue
        wanted = set(returns.refs) if isinstance(returns, Template) else set(returns)
        writer.items(program.items, wanted)
        if isinstance(returns, Template):
            writer.lines.append(f"return {writer.template(returns)}")
        elif returns:
            values = [f"{self.names[key]}.contiguous()" for key in returns]
            writer.lines.append(f"return {values[0] if len(values) == 1 else ', '.join(values)}")
        self.functions.append(writer.finish())
        return self.functions

    def piece(self, piece: Piece, wanted: set[Key]) -> tuple[list[str], list[str]]:
        """Emit a nested piece; the names that it takes and gives."""
        takes = sorted(
            (key for key in used_by_items(piece.items) if not (isinstance(key, int) and self.is_state(key))),
            key=self.key_order,
        )
        gives = sorted((key for key in defined_by(piece) if key in wanted), key=self.key_order)
        writer = _Writer(self, piece, [self.key_name(key) for key in takes])
        writer.items(piece.items, set(gives))
        if gives:
            writer.lines.append(f"return {', '.join(self.names[key] for key in gives)}")
        self.functions.append(writer.finish())
        return [self.key_name(key) for key in takes], [self.names[key] for key in gives]

    def is_state(self, index: int) -> bool:
        return self.traced.steps[index].kind in ("state", "constant")

    def key_name(self, key: Key) -> str:
        if key is HERE:
            return "device"
        return self.names[key] if isinstance(key, int) else str(key)

    def key_order(self, key: Key) -> tuple[int, int, str]:
        if isinstance(key, int):
            return (int(self.traced.steps[key].kind != "input"), key, "")
        return (2, 0, self.key_name(key))


class _Writer:
    """Writes the body of one function."""

    def __init__(self, emitter: Emitter, piece: Piece, parameters: Sequence[str]) -> None:
        self.emitter = emitter
        self.piece = piece
        self.lines: list[str] = []
        self.function = Function(piece.path, piece.nth_call, tuple(parameters), "")
        self.function.globals["torch"] = torch
        training = emitter.modes.bound.get((emitter.stage_index, piece.path, piece.nth_call))
        if training is not None:
            self.lines.append(f"{self.shared('require_mode', require_mode)}(self, {training}, {piece.path!r})")

    def finish(self) -> Function:
        suffix = "" if self.piece.nth_call == 0 else f"_call_{self.piece.nth_call}"
        header = f"def forward{suffix}({', '.join(('self', *self.function.parameters))}):"
        self.function.source = "\n".join([header, *(f"    {line}" for line in self.lines or ["pass"])]) + "\n"
        return self.function

    def items(self, items: Sequence[Item], wanted: set[Key], base: Context | None = None) -> None:
        """Write items in order, each in the modes that it was traced in."""
        base = base or self.piece.context
        pairs = zip(items, self._needed_after(items, wanted), strict=True)
        for context, group in itertools.groupby(pairs, key=lambda pair: pair[0].context):
            with self._inside(context, base):
                for item, needed in group:
                    _WRITE[type(item)](self, item, needed)

    @contextlib.contextmanager
    def _inside(self, context: Context, base: Context) -> Iterator[None]:
        """Write into a `with` block where the modes differ from those of the function."""
        managers = [f"torch.set_grad_enabled({context.grad})"] if context.grad != base.grad else []
        for device_type, dtype, enabled, cache in context.autocast[len(base.autocast) :]:
            managers.append(f"torch.autocast({device_type!r}, {dtype}, {enabled}, {cache})")
        if not managers:
            yield
            return
        outer = self.lines
        outer.append(f"with {', '.join(managers)}:")
        self.lines = _Block(outer)
        yield
        self.lines = outer

    def _needed_after(self, items: Sequence[Item], wanted: set[Key]) -> list[set[Key]]:
        needed = set(wanted)
        result: list[set[Key]] = []
        for item in reversed(items):
            result.append(set(needed))
            needed |= used_by_items((item,))
        return result[::-1]

    def operation(self, item: Operation, needed: set[Key]) -> None:
        step = item.step
        text = self._call_text(step)
        self.lines.append(f"{self.emitter.names[step.index]} = {text}" if step.index in needed else text)

    def _call_text(self, step: Step) -> str:
        if getattr(step.target, "__name__", "") == "getitem" and not step.kwargs:
            return f"{self.value(step.args[0])}[{self.value(step.args[1])}]"
        args, kwargs = self.emitter.modes.arguments_of(step)
        texts = [*map(self.value, args), *(f"{key}={self.value(value)}" for key, value in kwargs.items())]
        return f"{self._callable(step.target)}({', '.join(texts)})"

    def _callable(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            return f"torch.ops.{target._schema.name.replace('::', '.')}.{target._overloadname}"
        return self.shared(getattr(target, "__name__", "function"), target)

    def whole_call(self, item: WholeCall, needed: set[Key]) -> None:
        which = ["None"] if item.span.path in self.emitter.shared_paths else []
        call = self._call(self.module(item.span.path), item.span, which)
        self._bind_result(item.span, call, item.makes & needed)

    def function_call(self, item: FunctionCall, needed: set[Key]) -> None:
        cls = item.span.options["function"]
        call = self._call(f"{self.shared(cls.__name__, cls)}.apply", item.span, [])
        self._bind_result(item.span, call, item.makes & needed)

    def _call(self, callee: str, span: Span, first: list[str]) -> str:
        args, kwargs = span.args.structure.children
        leaves = iter(span.args.leaves)
        positional = [self._structured(child, leaves) for child in args.children]
        named = [
            f"{step[2:-2]}={self._structured(child, leaves)}"
            for step, child in zip(kwargs.steps, kwargs.children, strict=True)
        ]
        return f"{callee}({', '.join(first + positional + named)})"

    def _bind_result(self, span: Span, call: str, needed: frozenset[int]) -> None:
        names = self.emitter.names
        if not needed:
            self.lines.append(call)
            return
        if span.result.structure.rebuild is None:
            self.lines.append(f"{names[span.result.refs[0]]} = {call}")
            return
        whole = f"result_of_{re.sub(r'[^0-9a-zA-Z]+', '_', span.label)}_{span.begin}"
        kind, count = span.result.structure.kind, len(span.result.structure.children)
        if kind in ("tuple", "list"):
            call = f"{self.shared('require_items', require_items)}({call}, {kind}, {count}, {span.label!r})"
        self.lines.append(f"{whole} = {call}")
        for leaf, path in zip(span.result.leaves, span.result.structure.paths(), strict=True):
            if isinstance(leaf, Ref) and leaf.index in needed:
                self.lines.append(f"{names[leaf.index]} = {whole}{''.join(path)}")

    def checkpointed(self, item: Checkpointed, needed: set[Key]) -> None:
        emitter = self.emitter
        takes = sorted({index for index in item.span.args.refs if not emitter.is_state(index)})
        gives = sorted(index for index in defined_by(item) if index in needed)
        parameters = ", ".join(emitter.names[index] for index in takes)
        name = f"checkpointed_{item.span.begin}"
        outer = self.lines
        outer.append(f"def {name}({parameters}):")
        self.lines = _Block(outer)
        self.items(item.body, set(gives), item.span.context)
        self.lines.append(f"return ({''.join(f'{emitter.names[index]}, ' for index in gives)})")
        self.lines = outer
        options = ", ".join(f"{key}={self.shared_or_plain(key, value)}" for key, value in item.span.options.items())
        self.function.globals["checkpoint"] = torch.utils.checkpoint.checkpoint
        arguments = ", ".join(filter(None, [name, parameters, options]))
        targets = "".join(f"{emitter.names[index]}, " for index in gives)
        outer.append(f"{f'({targets}) = ' if gives else ''}checkpoint({arguments})")

    def buffer_update(self, item: BufferUpdate, needed: set[Key]) -> None:
        self.lines.append(f"{self.module(item.path)}.{item.name} = {self.value(Ref(item.value))}")

    def nested_piece(self, item: Piece, needed: set[Key]) -> None:
        takes, gives = self.emitter.piece(item, needed)
        which = [str(item.nth_call)] if item.path in self.emitter.shared_paths else []
        call = f"{self.module(item.path)}({', '.join(which + takes)})"
        self.lines.append(f"{', '.join(gives)} = {call}" if gives else call)

    def module(self, path: str) -> str:
        """The expression for a module, seen from the module whose forward this is."""
        base = self.piece.path
        path = self.emitter.paths.best(path, base)
        if not _is_below(path, base):
            self.function.elsewhere[path] = path
            return f"self._elsewhere[{path!r}]"
        relative = path if not base else path[len(base) + 1 :]
        return "self" + "".join(
            f".{part}" if part.isidentifier() else f"._modules[{part!r}]" for part in relative.split(".") if part
        )

    def state(self, index: int) -> str:
        step = self.emitter.traced.steps[index]
        if step.kind == "constant":
            return self._constant(step)
        owner, _, attribute = state_name(self.emitter.traced, index, self.piece.path).rpartition(".")
        return f"{self.module(owner)}.{attribute}"

    def _constant(self, step: Step) -> str:
        if not isinstance(step.constant, torch.Tensor):
            return self.shared(step.name, step.constant)
        name = f"_{step.name.lstrip('_')}"
        self.function.constants[name] = step.constant
        return f"self.{name}"

    def value(self, value: Any) -> str:
        """The expression for an argument."""
        if isinstance(value, Ref):
            return self._reference(value.index)
        if isinstance(value, Size):
            return self._size(value.expr)
        if value is HERE:
            return "device"
        if isinstance(value, ModuleRef):
            return self.module(value.path)
        if isinstance(value, Switch):
            return f"{self.value(value.training)} if self.training else {self.value(value.evaluation)}"
        if type(value) in (list, torch.fx.immutable_collections.immutable_list):
            return f"[{', '.join(map(self.value, value))}]"
        if type(value) is tuple:
            return f"({''.join(f'{self.value(item)}, ' for item in value)})"
        if type(value) is slice:
            return f"slice({', '.join(map(self.value, (value.start, value.stop, value.step)))})"
        return self.shared_or_plain("value", value)

    def _reference(self, index: int) -> str:
        emitter = self.emitter
        return self.state(index) if emitter.is_state(index) else emitter.names[index]

    def _size(self, expr: sympy.Basic) -> str:
        text: str = _printer.doprint(expr)
        if "math." in text:
            import math

            self.function.globals["math"] = math
        return f"({text})" if not text.isidentifier() else text

    def shared_or_plain(self, name: str, value: Any) -> str:
        if (
            value is None
            or type(value) in (bool, int, str)
            or (type(value) is float and value == value and abs(value) != float("inf"))
        ):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        return self.shared(name, value)

    def shared(self, name: str, value: Any) -> str:
        """A global of the generated code that stands for an object."""
        base = re.sub(r"\W+", "_", name)
        known = self.function.globals
        name, count = base, 1
        while name in known and known[name] is not value:
            name, count = f"{base}_{count}", count + 1
        known[name] = value
        return name

    def template(self, template: Template) -> str:
        return self._structured(template.structure, iter(template.leaves))

    def _structured(self, structure: Structure, leaves: Iterator[Any]) -> str:
        if structure.rebuild is None:
            return self.value(next(leaves))
        children = [self._structured(child, leaves) for child in structure.children]
        literal = _LITERALS.get(structure.kind)
        if literal is not None:
            return literal(structure, children)
        return f"{self.shared(f'rebuild_{structure.kind}', structure.rebuild)}([{', '.join(children)}])"


def _paths_with_several_forwards(program: Piece) -> frozenset[str]:
    """Modules that are run in more than one way in this stage: by two pieces, or by a piece and as a whole."""
    ways: dict[str, set[int | None]] = {}
    for item in walk(program.items):
        if isinstance(item, Piece):
            ways.setdefault(item.path, set()).add(item.nth_call)
        elif isinstance(item, WholeCall):
            ways.setdefault(item.span.path, set()).add(None)
    return frozenset(path for path, kinds in ways.items() if len(kinds) > 1)


def require_items(result: Any, kind: type, count: int, label: str) -> Any:
    """Called by generated code: a module must return what it returned when it was traced."""
    if not isinstance(result, tuple | list) or type(result) is not kind or len(result) != count:
        raise PipeError(
            f"{label} returned a {kind.__name__} of {count} when the model was traced, and now "
            f"{f'a {type(result).__name__} of {len(result)}' if isinstance(result, tuple | list) else type(result)}; "
            "a module that returns something else in another mode or after its hooks needs a new pipeline() call"
        )
    return result


class _Block(list[str]):
    """Lines that appear one level deeper in the list that they belong to."""

    def __init__(self, outer: list[str]) -> None:
        super().__init__()
        self._outer = outer

    def append(self, line: str) -> None:
        self._outer.append(f"    {line}")


_LITERALS: dict[str, Callable[[Structure, list[str]], str]] = {
    "tuple": lambda structure, children: f"({''.join(f'{child}, ' for child in children)})",
    "list": lambda structure, children: f"[{', '.join(children)}]",
    "dict": lambda structure, children: (
        "{" + ", ".join(f"{step[1:-1]}: {child}" for step, child in zip(structure.steps, children, strict=True)) + "}"
    ),
}

_WRITE: dict[type, Callable[[_Writer, Any, set[Key]], None]] = {
    Operation: _Writer.operation,
    WholeCall: _Writer.whole_call,
    FunctionCall: _Writer.function_call,
    Checkpointed: _Writer.checkpointed,
    BufferUpdate: _Writer.buffer_update,
    Piece: _Writer.nested_piece,
}
