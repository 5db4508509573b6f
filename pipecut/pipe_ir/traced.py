"""TracedModel: one run of a model, as a frozen list of operations and the module calls that they belong to.

Read this file first: all that a cut needs to know of a model, and all that is known of a cut one, is a value of one of
these classes.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import sympy
import torch
from torch import nn

from .spec import Dim, TensorSpec
from .structure import Atom, Structure, flatten
from .unsent import UnsentOutput

if TYPE_CHECKING:
    from .tracing.events import History, KeptValue

# The values that a trace holds on to as they are: there is nothing in them that could change.
PLAIN_TYPES = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), slice, range, type,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    types.BuiltinFunctionType, torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip


@dataclass(frozen=True)
class Ref(Atom):
    """Reference to the value that an operation makes."""

    index: int


@dataclass(frozen=True)
class ConstantRef(Ref):
    """Reference to a tensor made from Python values or met outside the model; it follows the stage's device."""


@dataclass(frozen=True)
class Size(Atom):
    """A number that follows from the symbolic dims, so that nobody needs to send it."""

    expr: sympy.Basic


@dataclass(frozen=True)
class ModuleRef(Atom):
    """A module of the model, passed as an argument."""

    path: str


@dataclass(frozen=True)
class Opaque(Atom):
    """A Python object that only the original code can make."""

    type_name: str


@dataclass(frozen=True)
class ForwardOf(Atom):
    """First argument of a module with generated forwards for calls of several forms: the variant that is meant."""

    variant: int
    nth_call: int = 0


class _Here:
    """The device of the traced run: in a stage, the device that the stage runs on."""

    def __repr__(self) -> str:
        return "HERE"


HERE = _Here()


@dataclass(frozen=True)
class Template:
    """A nested value whose leaves are Ref, Size, ModuleRef, Opaque or plain constants."""

    structure: Structure
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, convert: Callable[[Any], Any], *, holders: bool = False) -> Template:
        """Return the template of a nested value, each leaf converted."""
        leaves, structure = flatten(value, holders=holders)
        return cls(structure, tuple(map(convert, leaves)))

    def converted(self, convert: Callable[[Any], Any]) -> Template:
        """Return the same template with each leaf converted once more."""
        return Template(self.structure, tuple(map(convert, self.leaves)))

    @property
    def refs(self) -> tuple[int, ...]:
        return tuple(leaf.index for leaf in self.leaves if isinstance(leaf, Ref))

    @property
    def is_plain(self) -> bool:
        return not any(isinstance(leaf, Opaque) for leaf in self.leaves)


@dataclass(frozen=True)
class Autocast:
    """One `with torch.autocast(...)` block; `number` distinguishes it from others like it.

    The cache of casts is not recorded: a trace always switches it off.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool
    number: int


@dataclass(frozen=True)
class Context:
    """The modes that an operation runs in: gradients on or off, the autocast blocks around it, vmap levels."""

    grad: bool = True
    autocast: tuple[Autocast, ...] = ()
    vmap: int = 0

    def is_like(self, other: Context) -> bool:
        """Return True if the modes are the same, though the blocks may be others."""
        casts = [[(cast.device_type, cast.dtype, cast.enabled) for cast in each.autocast] for each in (self, other)]
        return (self.grad, self.vmap, casts[0]) == (other.grad, other.vmap, casts[1])


OperationKind = Literal["input", "state", "constant", "op", "mark"]


@dataclass(frozen=True)
class Operation:
    """One operation, or one value that exists from the start (a model input, a parameter, a constant).

    `number` is the type of a value that is no tensor but a number, which depends on the data.
    """

    index: int
    tick: int
    kind: OperationKind
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    spec: TensorSpec | None
    storage: int | None
    context: Context
    source: str
    refs: tuple[int, ...]
    writes: tuple[int, ...] = ()
    constant: Any = None
    number: type | None = None
    like: int | None = None  # the operation of an earlier call that it is a copy of: it computes the same of the same


SpanKind = Literal["call", "checkpoint", "function"]


@dataclass(frozen=True)
class Span:
    """A run of operations that belong together: a module's call, a checkpointed part, a custom autograd function."""

    kind: SpanKind
    path: str
    nth_call: int
    begin: int
    end: int
    args: Template
    result: Template
    context: Context
    children: tuple[Span, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    assigned_buffers: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Module path as `split_spec` spells it: `blk` is the first call, `blk#1` the second."""
        return self.path if self.nth_call == 0 else f"{self.path}#{self.nth_call}"

    def walk(self) -> Iterator[Span]:
        """Yield this span and all inside it, in the order in which they begin."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class TracedInput:
    """One leaf of the model's arguments: a tensor input, or a Python value that the trace fixed."""

    path: str
    name: str
    value: int | None
    constant: Any = None
    spec: TensorSpec | None = None


@dataclass(frozen=True)
class Condition:
    """Statement about sizes that the model's code found true, and that the trace takes for granted.

    `span_begin` is the tick at which the innermost call around that code begins.
    """

    holds: sympy.Basic
    source: str
    span_begin: int

    def __str__(self) -> str:
        if isinstance(self.holds, sympy.core.relational.Relational):
            return f"{self.holds.lhs} {self.holds.rel_op} {self.holds.rhs}"
        return str(self.holds)


@dataclass(frozen=True)
class FixedDim:
    """A dim of an input that was symbolic when the trace began, and that the model's code has tied to `size`.

    `name` is what the user calls it, `source` the line of code, `asked` is True if the user wants it to be symbolic.
    `as_number` says that the code asked for the plain number (`len(x)`): the model itself runs with others. It may not
    where a size is fixed by a comparison, as with the width of a weight.
    """

    path: str
    dim: int
    name: str | None
    size: Dim
    source: str
    asked: bool
    as_number: bool = False


@dataclass(frozen=True)
class TracedCall:
    """Calling convention of a traced model, without the model: signature, inputs, and conditions on their sizes.

    `hints` are the symbolic sizes as they were in the example.
    """

    model_name: str
    signature: inspect.Signature
    inputs: tuple[TracedInput, ...]
    dims: Mapping[sympy.Symbol, tuple[int, int]]
    hints: Mapping[str, int]
    conditions: tuple[Condition, ...]
    named_dims: tuple[str, ...] = ()
    fixed_dims: tuple[FixedDim, ...] = ()
    autocast: str = ""  # the one around the trace, in words


@dataclass(frozen=True)
class Fallback:
    """A module that is never cut inside, and always runs its own code: mostly one that could not be traced."""

    path: str
    reason: str
    because: str = "could not be traced"


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A traced run. Ticks order all operations, and the begin and end of all spans.

    `dims` says of which input's dim each symbol is the size, `hints` what that size was in the example.
    `conditions` on sizes hold in every call that the trace can stand for. `reached_state` are parameters that code
    reached past the traced copy, through a function that holds on to the model. `mode_readers` are the modules whose
    forward looked at a `training` flag, `assigned_attributes` the attributes, apart from buffers, that the forward of
    a module has set or changed; `changing` are modules that did more than their operations show, or something else when
    they ran again; `kept` are values in objects of Python's that the forward keeps there, and the stages do not.
    `fallbacks` are the modules that could not be traced.
    `named_dims` are the symbols that the user named, `fixed_dims` the sizes that could not stay symbolic.
    `autocast` is the one around the whole trace, in words. `draws` are the random numbers outside of operations, as
    lines of code or names of generators, by which the code may have decided. `history` is what the traced run did, to
    be compared with other runs; a cut model does not have it any more.
    `optional_outputs` are the values of the output that are not sent to the last stage for its sake alone.
    """

    operations: tuple[Operation, ...]
    root: Span
    inputs: tuple[TracedInput, ...]
    signature: inspect.Signature
    output: Template
    dims: Mapping[sympy.Symbol, tuple[int, int]]
    hints: Mapping[str, int]
    state_names: Mapping[int, tuple[str, ...]]
    device: torch.device
    model: nn.Module
    training: bool
    conditions: tuple[Condition, ...] = ()
    reached_state: frozenset[int] = frozenset()
    mode_readers: frozenset[str] = frozenset()
    assigned_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    changing: frozenset[str] = frozenset()
    kept: tuple[KeptValue, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    named_dims: tuple[str, ...] = ()
    fixed_dims: tuple[FixedDim, ...] = ()
    autocast: str = ""
    draws: tuple[str, ...] = ()
    history: History | None = None
    optional_outputs: frozenset[int] = frozenset()

    @property
    def call(self) -> TracedCall:
        """Calling convention of the model."""
        return TracedCall(
            type(self.model).__name__,
            self.signature,
            self.inputs,
            self.dims,
            self.hints,
            self.conditions,
            self.named_dims,
            self.fixed_dims,
            self.autocast,
        )

    def fallback(self, path: str) -> Fallback | None:
        """Return the untraceable module that is, or contains, the module at a path."""
        return next((item for item in self.fallbacks if f"{path}.".startswith(f"{item.path}.")), None)

    def spans(self, kind: SpanKind | None = None) -> Iterator[Span]:
        """Return all spans, or those of one kind, in the order in which they begin."""
        return (span for span in self.root.walk() if kind is None or span.kind == kind)

    def operations_within(self, begin: int, end: int) -> tuple[Operation, ...]:
        """Return the operations with begin <= tick < end."""
        timed, ticks = self._timed
        return timed[bisect.bisect_left(ticks, begin) : bisect.bisect_left(ticks, end)]

    @functools.cached_property
    def _timed(self) -> tuple[tuple[Operation, ...], list[int]]:
        timed = tuple(op for op in self.operations if op.tick >= 0)
        return timed, [op.tick for op in timed]


# Values that describe a cut model: its edges, its stages, its tied parameters.


@dataclass(frozen=True)
class Edge:
    """A value that one stage makes and another uses.

    An "activation" goes from the stage that made it to one that uses it, however far. A "root input" is a model input
    that a later stage uses; it comes from the first stage, where the data is.
    """

    value: int
    name: str
    kind: Literal["activation", "root input"]
    source: int
    target: int
    spec: TensorSpec

    def __str__(self) -> str:
        return f"{self.name}: {self.source} -> {self.target} {self.spec}"


@dataclass(frozen=True)
class RecomputedValue:
    """A value that a stage makes again, since that costs less than receiving it from the stage that made it."""

    value: int
    name: str
    source: int
    stage: int
    spec: TensorSpec


@dataclass(frozen=True)
class TiedParameter:
    """One parameter held by several stages; its gradient is the sum over all of them."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    owner: int


@dataclass(frozen=True)
class StageInfo:
    """Inputs and outputs of a stage, in the order of its forward's arguments and results."""

    index: int
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    outputs: tuple[int, ...]
    output_names: tuple[str, ...]
    modules: tuple[str, ...]
    flops: sympy.Expr
    code: Mapping[str, str]
    structure: str = ""  # how many modules and tensors it held when it was cut, with a digest
    changing: tuple[str, ...] = ()  # whole modules that did something else when they ran again


@dataclass(frozen=True)
class PipeInfo:
    """Description of a Pipe without its modules, small enough to send to other ranks."""

    num_stages: int
    stages: tuple[StageInfo, ...]
    edges: tuple[Edge, ...]
    tied_parameters: tuple[TiedParameter, ...]
    unused_parameters: tuple[str, ...]
    call: TracedCall
    is_random: bool = False  # True if the model draws random numbers, or may
    names: tuple[str, ...] = ()  # all names of parameters, buffers and extra state, in the model's order
    unsent: tuple[UnsentOutput, ...] = ()
