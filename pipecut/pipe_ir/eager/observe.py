"""Observation of a model's run on real tensors: what each module call takes, returns, writes and hides."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...torch_internals import STATE_DICTS, buffers_of, is_transforming, parameters_of, storage_id, version_of
from ..copies import quiet_subclass
from ..operators import is_mark
from ..sizes.dynamic import Place
from ..structure import Atom, flatten, nested_tensors
from ..traced import Template

CallKey = tuple[str, int]
_Shape = tuple[int, ...]


@dataclass(frozen=True)
class ObservedTensor(Atom):
    """A tensor among the results of a call.

    `argument` is the position of the tensor argument that it shares its memory with, `state` the name of the
    parameter or buffer that it is.
    """

    shape: _Shape
    stride: _Shape
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    argument: int | None
    state: str | None


@dataclass(frozen=True)
class ObservedCall:
    """One call of a module: shapes and strides of its tensor arguments, its result, and what it wrote to.

    `hidden` are the ties of the call to the code around it besides arguments and results; `marked` is True if a
    pipe_split() ran inside.
    """

    argument_shapes: tuple[_Shape, ...]
    argument_strides: tuple[_Shape, ...]
    result: Template
    written_arguments: tuple[int, ...]
    written_buffers: tuple[str, ...]
    hidden: tuple[str, ...]
    marked: bool


@dataclass(frozen=True)
class ObservedRun:
    """One run of a model: the shapes of its tensor inputs, and all calls by path and number."""

    input_shapes: tuple[_Shape, ...]
    calls: Mapping[CallKey, ObservedCall]
    changed: tuple[str, ...] = ()  # attributes that forwards have set


@dataclass(frozen=True)
class Observations:
    """Runs of a model on the example and on other sizes, and the sizes that must be the same."""

    on_example: ObservedRun
    on_other_sizes: tuple[ObservedRun, ...]
    same_sizes: tuple[tuple[Place, ...], ...]

    @property
    def runs(self) -> tuple[ObservedRun, ...]:
        return (self.on_example, *self.on_other_sizes)


@dataclass(eq=False)
class _OpenCall:
    """A call while its code runs."""

    path: str
    tensors: list[Tensor]
    versions: list[int]
    buffers: list[tuple[str, Tensor, int]]
    returned: set[int] | None = None
    hidden: dict[str, None] = field(default_factory=dict)
    marked: bool = False


class Watcher(TorchFunctionMode):
    """Mode that observes the module calls of `model`, a copy of the user's, while it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._finished: dict[CallKey, tuple[_OpenCall, ObservedCall]] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._open: list[_OpenCall] = []
        self._makers: MutableMapping[Tensor, tuple[_OpenCall, ...]] = WeakIdKeyDictionary()
        self._own_work = 0
        self._state = {
            id(tensor): name
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        self._owners: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
                if tensor is not None:
                    self._owners.setdefault(id(tensor), []).append(f"{path}.")
        for path, module in model.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule):
                module.__class__ = quiet_subclass(type(module), {"__call__": self._watched(path, type(module))})

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[CallKey, ObservedCall]:
        """Run the model; return the observations of all calls but its own."""
        for tensor in _tensors((args, dict(kwargs))):
            self._makers[tensor] = ()
        with self:
            output = self._model(*args, **kwargs)
        for tensor in _tensors(output, holders=True):
            self._note_use(tensor)
        return {
            key: replace(observed, hidden=tuple(call.hidden), marked=call.marked)
            for key, (call, observed) in self._finished.items()
        }

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._own_work:
            return func(*args, **(kwargs or {}))
        used = list(nested_tensors((args, kwargs or {})))
        for tensor in used:
            self._note_use(tensor)
        result = func(*args, **(kwargs or {}))
        known = set(map(id, used))
        for tensor in nested_tensors(result):
            if id(tensor) not in known:
                self._makers.setdefault(tensor, tuple(self._open))
        if is_mark(func):
            for call in self._open:
                call.marked = True
        return result

    def _note_use(self, tensor: Tensor) -> None:
        """Note the use of a tensor that got into a call, or out of it, past its arguments and results."""
        if id(tensor) in self._owners:
            for call in self._open:
                self._note_foreign_state(tensor, call)
            return
        makers = self._makers.get(tensor)
        if makers is None:
            return
        for call in self._open:
            if call not in makers and not any(tensor is argument for argument in call.tensors):
                call.hidden["uses a tensor of another module that is not among its arguments"] = None
        for call in makers:
            if call.returned is not None and id(tensor) not in call.returned:
                call.hidden["makes a tensor that others use and that is not among its results"] = None

    def _watched(self, path: str, cls: type[nn.Module]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_transforming():  # a part of the call that transforms it: it cannot stay as it is on its own
                self._counts[path] += 1
                return cls.__call__(module, *args, **kwargs)
            with self._looking():
                call = self._opened(path, module, args, kwargs)
            self._open.append(call)
            key = (path, self._counts[path])
            self._counts[path] += 1
            try:
                output = cls.__call__(module, *args, **kwargs)
            finally:
                assert self._open.pop() is call
            with self._looking():
                self._finished[key] = call, self._closed(call, module, output)
            return output

        return __call__

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Ignore operations on tensors that are not the model's own."""
        self._own_work += 1
        try:
            yield
        finally:
            self._own_work -= 1

    def _opened(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> _OpenCall:
        tensors = _tensors((args, kwargs))
        buffers = [(f"{path}.{name}", tensor, _version(tensor)) for name, tensor in module.named_buffers()]
        call = _OpenCall(path, tensors, [_version(tensor) for tensor in tensors], buffers)
        # Used or not in this run: nobody knows where the module's code goes in another one.
        for tensor in _plain_attributes(module):
            self._note_foreign_state(tensor, call)
        return call

    def _note_foreign_state(self, tensor: Tensor, call: _OpenCall) -> None:
        owners = self._owners.get(id(tensor))
        if owners is None or any(owner.startswith(f"{call.path}.") for owner in owners):
            return
        if not any(tensor is argument for argument in call.tensors):
            call.hidden[f"uses {self._state[id(tensor)]!r}, which is not its own"] = None

    def _closed(self, call: _OpenCall, module: nn.Module, output: Any) -> ObservedCall:
        call.returned = set(map(id, _tensors(output, holders=True)))
        written = [at for at, tensor in enumerate(call.tensors) if _version(tensor) != call.versions[at]]
        now = {f"{call.path}.{name}": tensor for name, tensor in module.named_buffers()}
        buffers = [
            name for name, tensor, version in call.buffers if now.get(name) is not tensor or _version(tensor) != version
        ]
        observed = ObservedCall(
            tuple(tuple(tensor.shape) for tensor in call.tensors),
            tuple(stride_of(tensor) for tensor in call.tensors),
            Template.of(output, lambda leaf: self._observed(leaf, call), holders=True),
            tuple(written),
            tuple(buffers),
            (),
            False,
        )
        # The arguments need not live on: nobody else asks for them.
        call.tensors, call.buffers = [], []
        return observed

    def _observed(self, leaf: Any, call: _OpenCall) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout != torch.strided:
            call.hidden["returns a sparse tensor"] = None
        memory = _memory(leaf)
        shared = (at for at, tensor in enumerate(call.tensors) if memory is not None and _memory(tensor) == memory)
        offset = int(leaf.storage_offset()) if memory is not None else 0
        return ObservedTensor(
            tuple(leaf.shape), stride_of(leaf), offset, leaf.dtype, leaf.device, leaf.requires_grad,
            next(shared, None), self._state.get(id(leaf)),
        )  # fmt: skip


def _tensors(value: Any, *, holders: bool = False) -> list[Tensor]:
    return [leaf for leaf in flatten(value, holders=holders)[0] if isinstance(leaf, Tensor)]


def _plain_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a module and those inside it keep without having registered them."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name not in STATE_DICTS:
                yield from nested_tensors(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def stride_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, numbers or symbols; none of a sparse one."""
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def _memory(tensor: Tensor) -> int | None:
    return storage_id(tensor) if tensor.layout == torch.strided else None
