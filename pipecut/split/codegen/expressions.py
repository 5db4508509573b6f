"""Values, modules and parameters as Python expressions, seen from the module whose forward is written."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx.immutable_collections import immutable_list

from ...pipe_ir import HERE, ModuleRef, Operation, Ref, Size, Structure, Template, TracedModel
from ...torch_internals import is_overload, overload_name, python_text, schema_of
from ..modes import Switch
from ..program import Key
from ..state import state_name


@dataclass(frozen=True)
class Naming:
    """Names in one stage's code: values by name, modules by all their paths."""

    traced: TracedModel
    values: Mapping[int, str]
    module_aliases: Mapping[str, tuple[str, ...]]

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that are taken by values and sizes."""
        return frozenset((*self.values.values(), *map(str, self.traced.dims)))

    def name(self, key: Key) -> str:
        """Return the variable that holds a value, a symbolic dim or the device."""
        if key is HERE:
            return "device"
        return self.values[key] if isinstance(key, int) else str(key)

    def order(self, key: Key) -> tuple[int, int, str]:
        """Return the position of a value among arguments: model inputs, other values, sizes."""
        if isinstance(key, int):
            return (int(self.traced.operations[key].kind != "input"), key, "")
        return (2, 0, self.name(key))

    def is_state(self, key: Key) -> bool:
        """Return True if a value is an attribute of some module, and not a variable."""
        return isinstance(key, int) and self.traced.operations[key].kind in ("state", "constant")

    def path_below(self, path: str, base: str) -> str:
        """Return the path of a module that lies below `base`, if it has one there."""
        aliases = self.module_aliases.get(path, (path,))
        return next((alias for alias in aliases if _is_below(alias, base)), path)


def _is_below(path: str, base: str) -> bool:
    """Return True if a module path is `base` or inside it."""
    return base == "" or path == base or path.startswith(f"{base}.")


def is_plain_name(name: str) -> bool:
    """Return True if `object.name` is Python."""
    return name.isidentifier() and not keyword.iskeyword(name)


@dataclass
class Expressions:
    """Writes expressions for the forward of the module at `base`, and collects what they refer to."""

    naming: Naming
    base: str
    globals: dict[str, Any] = field(default_factory=lambda: {"torch": torch})
    elsewhere: set[str] = field(default_factory=set)

    def value(self, value: Any) -> str:
        """Return the expression for an argument."""
        for kind, write in _WRITERS.items():
            if isinstance(value, kind):
                return write(self, value)
        return "device" if value is HERE else self._plain(value)

    def reference(self, index: int) -> str:
        """Return the expression for the value of an operation."""
        if not self.naming.is_state(index):
            return self.naming.values[index]
        op = self.naming.traced.operations[index]
        if op.kind == "constant":
            return self._constant(op)
        owner, _, attribute = state_name(self.naming.traced, index, self.base).rpartition(".")
        module = self.module(owner)
        return f"{module}.{attribute}" if is_plain_name(attribute) else f"getattr({module}, {attribute!r})"

    def module(self, path: str) -> str:
        """Return the expression for a module."""
        path = self.naming.path_below(path, self.base)
        if not _is_below(path, self.base):
            self.elsewhere.add(path)
            return f"self._elsewhere[{path!r}]"
        relative = path[len(self.base) + 1 :] if self.base else path
        parts = relative.split(".") if relative else []
        # Users read generated code, which names nothing of pipecut: it looks a child up as nn.Module itself does.
        return "self" + "".join(f".{part}" if is_plain_name(part) else f"._modules[{part!r}]" for part in parts)

    def shared(self, name: str, value: Any) -> str:
        """Return a global of the generated code that stands for an object."""
        base = re.sub(r"\W+", "_", name)
        name, count = base, 1
        while name in self.naming.variables or (name in self.globals and self.globals[name] is not value):
            name, count = f"{base}_{count}", count + 1
        self.globals[name] = value
        return name

    def operator(self, target: Any) -> str:
        """Return the expression for what an operation calls."""
        if is_overload(target):
            return f"torch.ops.{schema_of(target).name.replace('::', '.')}.{overload_name(target)}"
        return self.shared(getattr(target, "__name__", "function"), target)

    def template(self, template: Template) -> str:
        """Return the expression that builds a nested value."""
        return self.structured(template.structure, iter(template.leaves))

    def structured(self, structure: Structure, leaves: Iterator[Any]) -> str:
        """Return the expression for a part of a nested value, taking its leaves from the iterator."""
        if structure.rebuild is None:
            return self.value(next(leaves))
        children = [self.structured(child, leaves) for child in structure.children]
        literal = _LITERALS.get(structure.kind)
        if literal is not None:
            return literal(structure, children)
        return f"{self.shared(f'rebuild_{structure.kind}', structure.rebuild)}([{', '.join(children)}])"

    def _constant(self, op: Operation) -> str:
        name = self.shared(op.name, op.constant)
        if not isinstance(op.constant, torch.Tensor) or isinstance(op.constant, nn.Parameter):
            return name  # a parameter of nobody's module stays where it is, as in the model
        # Not a buffer of the stage: to_empty() and half() would change it, as they do not in the model.
        return f"{name}.to(device)"

    def _size(self, size: Size) -> str:
        text = python_text(size.expr)
        if "math." in text:
            self.globals["math"] = math
        return text if text.isidentifier() else f"({text})"

    def _plain(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        return self.shared("value", value)

    def _items(self, values: Any) -> str:
        return "".join(f"{self.value(item)}, " for item in values)


# The types of arguments that are not plain constants. Subclasses of list and tuple are shared as they are.
_WRITERS: dict[type, Callable[[Expressions, Any], str]] = {
    Ref: lambda to, value: to.reference(value.index),
    Size: lambda to, value: to._size(value),
    ModuleRef: lambda to, value: to.module(value.path),
    Switch: lambda to, value: f"{to.value(value.training)} if self.training else {to.value(value.evaluation)}",
    immutable_list: lambda to, value: f"[{to._items(value).removesuffix(', ')}]",
    list: lambda to, value: f"[{to._items(value).removesuffix(', ')}]",
    torch.Size: lambda to, value: f"torch.Size(({to._items(value)}))",
    tuple: lambda to, value: f"({to._items(value)})",
    slice: lambda to, value: f"slice({to._items((value.start, value.stop, value.step))})",
}

_LITERALS: dict[str, Callable[[Structure, list[str]], str]] = {
    "tuple": lambda structure, children: f"({''.join(f'{child}, ' for child in children)})",
    "list": lambda structure, children: f"[{', '.join(children)}]",
    "dict": lambda structure, children: (
        "{" + ", ".join(f"{key[1:-1]}: {child}" for key, child in zip(structure.keys, children, strict=True)) + "}"
    ),
}


_RESERVED = {"self", "device", "checkpoint", "torch", "piece"}


def name_values(traced: TracedModel) -> dict[int, str]:
    """Name the value of every operation: inputs as the user calls them, module results by the module's path."""
    wishes = {op.index: op.name for op in traced.operations}
    for span in traced.spans("call"):
        made = [
            leaf.index
            for leaf in span.result.leaves
            if isinstance(leaf, Ref) and traced.operations[leaf.index].tick >= span.begin
        ]
        for position, index in enumerate(made):
            if span.path and span.begin < traced.operations[index].tick:
                # Outer calls come first in the walk; the innermost module is the one that made the value.
                wishes[index] = span.label if len(made) == 1 else f"{span.label}_{position}"
    return _unique(traced, wishes)


def _unique(traced: TracedModel, wishes: dict[int, str]) -> dict[int, str]:
    taken = {*_RESERVED, *map(str, traced.dims), *keyword.kwlist}
    names: dict[int, str] = {}
    inputs_first = sorted(wishes, key=lambda index: traced.operations[index].kind != "input")
    for index in inputs_first:
        base = re.sub(r"\W+", "_", wishes[index])
        base = base if base.isidentifier() else f"_{base}"
        name, count = base, 1
        while name in taken:
            name, count = f"{base}_{count}", count + 1
        taken.add(name)
        names[index] = name
    return names
