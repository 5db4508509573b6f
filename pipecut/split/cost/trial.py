"""Trial runs of operations on fake tensors of symbolic sizes: what they are made of, and what autograd keeps.

Most operators of a trace lie above autograd, and many are made of others (einsum, tensordot). Nobody has to know how:
torch runs them without computing anything, and is watched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...pipe_ir import (
    HERE,
    Autocast,
    Dim,
    Opaque,
    Operation,
    Ref,
    Shape,
    Size,
    TensorSpec,
    TracedModel,
    active_autocast,
    operator_name,
)
from ...torch_internals import (
    FAKE_TENSOR_LOGGER,
    FakeTensorMode,
    TorchDispatchMode,
    is_overload,
    storage_id,
    symbol_source,
)


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor among the tensors of a call."""

    number: int


@dataclass(frozen=True)
class _Call:
    """An operation on tensors known by shape, dtype and layout only. Equal calls are tried once."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    tensors: tuple[TensorSpec, ...]
    device: torch.device
    sizes: tuple[tuple[str, int], ...]
    autocast: tuple[Autocast, ...]  # the blocks around it, inside of the autocast that all of this runs under
    ambient: str = ""


@dataclass(frozen=True)
class _Part:
    """One operation that another one is made of; arguments are shapes where they are tensors."""

    name: str
    args: tuple[Any, ...]
    out: Shape


@dataclass(frozen=True)
class _SavedTensors:
    """Tensors that autograd keeps for the backward: arguments by their slots, the result, and bytes of other memory."""

    arguments: tuple[int, ...]
    result: bool
    others: Dim


@dataclass(frozen=True)
class _TrialResult:
    """Observations of a trial; `kept` is None if it is known only for the sizes of the example."""

    parts: tuple[_Part, ...]
    kept: _SavedTensors | None


def arguments_of(op: Operation) -> tuple[int, ...]:
    """Return the operations that made the tensors of a call, by slot."""
    return tuple(dict.fromkeys(op.refs))


def try_operation(traced: TracedModel, op: Operation) -> _TrialResult | None:
    """Run an operation on its own to see what it keeps; None for one that writes or is not an operator of torch."""
    call = _call_of(traced, op)
    return None if call is None else _tried(call)


def _call_of(traced: TracedModel, op: Operation) -> _Call | None:
    indices = arguments_of(op)
    specs = [traced.operations[index].spec for index in indices]
    known = [spec for spec in specs if spec is not None and len(spec.stride) == len(spec.shape)]
    leaves = [*_leaves(op.args), *_leaves(tuple(op.kwargs.values()))]
    sizes = [leaf.expr for leaf in leaves if isinstance(leaf, Size)]
    if (
        not is_overload(op.target)
        or op.target.namespace != "aten"
        or op.writes
        or op.context.vmap
        or len(known) < len(specs)
        or any(isinstance(leaf, Opaque) for leaf in leaves)
        or not all(isinstance(size, sympy.Expr) and size.is_integer for size in sizes)
    ):
        return None
    slots = {index: _Slot(number) for number, index in enumerate(indices)}
    device = traced.device if traced.device.type != "meta" else torch.device("cpu")

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return slots[leaf.index]
        return device if leaf is HERE else leaf

    symbols = set().union(*(spec.symbols for spec in known), *(size.free_symbols for size in sizes))
    return _Call(
        op.target,
        _mapped(plain, op.args),
        tuple((name, _mapped(plain, value)) for name, value in op.kwargs.items()),
        tuple(known),
        device,
        # A size of 1 would be taken for one that is always 1.
        tuple(sorted((str(symbol), max(2, traced.hints.get(str(symbol), 2))) for symbol in symbols)),
        # What blocks of one kind do to an operation is the same.
        tuple(replace(block, number=0) for block in op.context.autocast),
        active_autocast(),
    )


@functools.lru_cache(maxsize=4096)
def _tried(call: _Call) -> _TrialResult | None:
    sizes = _Sizes(dict(call.sizes))
    # A tensor that is made in inference mode stays out of autograd for good.
    with torch.inference_mode(False), FakeTensorMode(shape_env=sizes.env) as without_memory:
        tensors = [sizes.tensor(spec, call.device) for spec in call.tensors]

    def real(leaf: Any) -> Any:
        if isinstance(leaf, _Slot):
            return tensors[leaf.number]
        return sizes.size(leaf.expr) if isinstance(leaf, Size) else leaf

    args, kwargs = _mapped(real, call.args), {name: _mapped(real, value) for name, value in call.kwargs}
    kept: dict[int, Tensor] = {}
    watch = _PartRecorder(sizes)
    try:
        with torch.inference_mode(False), without_memory, watch, _modes(call), _note_saved(kept):
            result = call.target(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
        # Not every operator can be run without values; it is then judged by its arguments, as custom operators are.
        return None
    given = {storage_id(tensor): slot for slot, tensor in enumerate(tensors)}
    made = storage_id(result) if isinstance(result, Tensor) else None
    others = [tensor for memory, tensor in kept.items() if memory not in given and memory != made]
    if others and sizes.has_fixed_some:
        return _TrialResult(tuple(watch.parts), None)
    arguments = tuple(slot for memory, slot in given.items() if memory in kept)
    size: Dim = sum(sizes.dim(tensor.untyped_storage().nbytes()) for tensor in others)
    return _TrialResult(tuple(watch.parts), _SavedTensors(arguments, made in kept, size))


@contextlib.contextmanager
def _modes(call: _Call) -> Iterator[None]:
    """Run the operation as in training, whatever mode the model is priced in."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)  # it writes a page for an operation that cannot be tried
    disabled, logger.disabled = logger.disabled, True
    try:
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.enable_grad())
            for block in call.autocast:
                modes.enter_context(
                    torch.autocast(block.device_type, block.dtype, enabled=block.enabled, cache_enabled=False)
                )
            yield
    finally:
        logger.disabled = disabled


class _PartRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that an operation is made of."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes
        self.parts: list[_Part] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.size.default:
            # Code that looks at sizes as plain numbers would fix them all; most of it goes on to use few of them.
            return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in args[0].shape)
        result = func(*args, **(kwargs or {}))
        shapes = _mapped(self._shape, args)
        self.parts.append(_Part(operator_name(func), shapes, self._shape(result) if isinstance(result, Tensor) else ()))
        return result

    def _shape(self, leaf: Any) -> Any:
        return tuple(map(self.sizes.dim, leaf.shape)) if isinstance(leaf, Tensor) else leaf


class _Sizes:
    """The symbolic dims of a trace, as torch has them while it runs, and back."""

    def __init__(self, hints: Mapping[str, int]) -> None:
        self.env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.hints = hints
        self._to_torch = {name: self._symbol(name, hint) for name, hint in hints.items()}
        self._back: dict[sympy.Basic, sympy.Basic] = {}

    def _symbol(self, name: str, hint: int) -> sympy.Expr:
        return self.env.create_symbol(hint, symbol_source(name), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)

    @property
    def has_fixed_some(self) -> bool:
        """True if the operator's code has asked for a size as a plain number: what came of it holds for that alone."""
        return bool(self.env.replacements)

    def tensor(self, spec: TensorSpec, device: torch.device) -> Tensor:
        """Return a tensor that looks like this."""
        shape, stride = (tuple(map(self.size, dims)) for dims in (spec.shape, spec.stride))
        made = torch.empty_strided(shape, stride, dtype=spec.dtype, device=device)
        return made.requires_grad_(spec.requires_grad)

    def size(self, dim: Any) -> Any:
        """Return a dim of the trace as a size that torch takes."""
        if isinstance(dim, int) or dim.is_number:
            return int(dim)
        symbols = {symbol: self._to_torch[str(symbol)] for symbol in dim.free_symbols}
        self._back |= {there: here for here, there in symbols.items()}
        hint = int(dim.subs({symbol: self.hints[str(symbol)] for symbol in dim.free_symbols}))
        return self.env.create_symintnode(dim.xreplace(symbols), hint=hint)

    def dim(self, size: Any) -> Dim:
        """Return a size of torch's as a dim of the trace."""
        return size.node.expr.xreplace(self._back) if isinstance(size, torch.SymInt) else int(size)


def _note_saved(kept: dict[int, Tensor]) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        kept[storage_id(tensor)] = tensor
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with its leaves changed; lists become tuples, which can be keys."""
    return tuple(_mapped(change, item) for item in value) if isinstance(value, list | tuple) else change(value)
