"""Modules that stay as they are during a trace: each of their calls is one operation, and their code does not run."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import assume
from ..copies import quiet_subclass
from ..structure import flatten, unflatten
from ..tracing.recorder import Recorder
from ..tracing.records import why_and_where
from ..tracing.replay import StandInInputs
from .example_runs import KnownSize, size_from
from .observe import CallKey, Observations, ObservedCall, ObservedRun, ObservedTensor, stride_of

# The operator that stands in a trace for the call of a module that stays as it is.
torch.library.define(
    "pipecut::eager_call",
    "(Tensor[] inputs, Tensor[] state, Tensor(a!)[] written, str label) -> Tensor[]",
)

_EAGER_CALL: Callable[..., list[torch.Tensor]] = torch.ops.pipecut.eager_call.default


@dataclass(frozen=True)
class _NewTensor:
    """A tensor that a call is to return; a size of None depends on the data.

    `order` are its dims as they lie in memory.
    """

    shape: tuple[Any, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_TO_MAKE: list[Sequence[_NewTensor]] = []


@torch.library.register_fake("pipecut::eager_call")  # type: ignore[untyped-decorator]
def _stand_ins(*_: Any) -> list[torch.Tensor]:
    new_size = torch.library.get_ctx().new_dynamic_size
    return [_empty(new, [new_size() if size is None else size for size in new.shape]) for new in _TO_MAKE[-1]]


def _empty(new: _NewTensor, shape: list[Any]) -> torch.Tensor:
    lying = torch.empty([shape[dim] for dim in new.order], dtype=new.dtype, device=new.device)
    return lying.permute([new.order.index(dim) for dim in range(len(shape))])


def _record_call(
    inputs: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    label: str,
    results: Sequence[_NewTensor],
) -> list[torch.Tensor]:
    """Add one operation to the current trace; return its results, tensors of the tracer."""
    _TO_MAKE.append(results)
    try:
        return list(_EAGER_CALL(list(inputs), list(state), list(written), label))
    finally:
        _TO_MAKE.pop()


class HiddenTieError(Exception):
    """Raised for a module that exchanges tensors with others besides its arguments and results."""


class EagerModules:
    """Modules that stay as they are in one trace: those at `paths`, and any that turns out to be untraceable.

    `found` has the latter, each with the reason. A trace in which something was found is of no use, as
    it holds what these modules did before they failed; it has to be made again. With `finds=False` it is an error.
    """

    def __init__(self, observed: Observations, paths: Collection[str], *, finds: bool = True) -> None:
        self.observed = observed
        self.paths = paths
        self._finds = finds
        self.found: dict[str, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._model: nn.Module
        self._recorder: Recorder | StandInInputs

    def restart(self) -> None:
        """Begin another run of the same copy: calls are counted anew."""
        self._counts.clear()

    def prepare(self, model: nn.Module, recorder: Recorder | StandInInputs) -> None:
        """Change the calls of the copy that is about to be traced, those of the model itself excepted."""
        self._model, self._recorder = model, recorder
        for path, module in model.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule):
                module.__class__ = quiet_subclass(type(module), {"__call__": self._call_of(path, type(module))})

    def _call_of(self, path: str, cls: type[nn.Module]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if not self._recorder.listens:
                return cls.__call__(module, *args, **kwargs)
            key = (path, self._counts[path])
            self._counts[path] += 1
            if path in self.paths:
                return self._stand_in(key, module, args, kwargs)
            depth = self._recorder.depth
            try:
                result = cls.__call__(module, *args, **kwargs)
                if self._recorder.listens:
                    self._recorder.check_constants()  # in time for this module to be the one that fails
                return result
            except Exception as error:
                call = self.observed.on_example.calls.get(key)
                if call is None or not self._finds:
                    raise
                if call.hidden:
                    tie = f"{path!r} cannot be traced ({why_and_where(error)}) nor stay as it is: it {call.hidden[0]}"
                    raise HiddenTieError(tie) from error
                # The trace goes on, so as to find the other modules that fail.
                self._recorder.abandon(depth)
                self.found[path] = why_and_where(error)  # the error itself would keep alive what was traced
                return self._stand_in(key, module, args, kwargs)

        return __call__

    def _stand_in(self, key: CallKey, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record one operation in place of a call; return the results of the example as tensors of the tracer."""
        path, number = key
        if key not in self.observed.on_example.calls:
            raise HiddenTieError(f"{path!r} is called {number + 1} times in the trace, and less often on the example")
        call = self.observed.on_example.calls[key]
        if call.hidden:
            raise HiddenTieError(f"{path!r} {call.hidden[0]}")
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        inputs = self._recorder.input_values
        for (nth, dim), *others in self.observed.same_sizes:
            for other, other_dim in others:
                assume(inputs[nth].shape[dim] == inputs[other].shape[other_dim])
        results = _Results(key, self.observed.runs, tensors, inputs)
        fresh = [new for position in range(len(call.result.leaves)) if (new := results.new(position)) is not None]
        state = [*module.parameters(), *module.buffers()]
        written = [tensors[at] for at in call.written_arguments]
        written += [self._model.get_buffer(name) for name in call.written_buffers]
        label = path if number == 0 else f"{path}#{number}"
        made = iter(_record_call(tensors, state, written, label, fresh))

        def result(position: int, leaf: Any) -> Any:
            if not isinstance(leaf, ObservedTensor):
                return next(made).item() if results.is_from_data(position) else results.size(position)
            if leaf.state is not None:
                return self._tensor(leaf.state)
            return _with_gradient(leaf, next(made) if results.is_fresh(leaf) else results.view(leaf))

        return unflatten(call.result.structure, list(itertools.starmap(result, enumerate(call.result.leaves))))

    def _tensor(self, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        tensor: Tensor = getattr(self._model.get_submodule(path), last)
        return tensor


class _Results:
    """Results of a call, with the sizes of this trace."""

    def __init__(
        self, key: CallKey, runs: Sequence[ObservedRun], tensors: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        first = runs[0].calls[key]
        alike = [run for run in runs if key in run.calls and _is_alike(run.calls[key], first)]
        self.calls = [run.calls[key] for run in alike]
        self.tensors = tensors
        of_runs = [(*call.argument_shapes, *run.input_shapes) for call, run in zip(self.calls, alike, strict=True)]
        names = (*(tensor.shape for tensor in tensors), *(tensor.shape for tensor in inputs))
        self.known = _known_sizes(of_runs, names)
        self.known_strides = [
            *self.known,
            *_known_sizes([call.argument_strides for call in self.calls], [stride_of(tensor) for tensor in tensors]),
        ]
        self._views: dict[ObservedTensor, tuple[list[Any], list[Any], Any]] = {}
        for position, leaf in enumerate(first.result.leaves):
            if isinstance(leaf, ObservedTensor):
                self._learn(position, leaf)

    def _learn(self, position: int, leaf: ObservedTensor) -> None:
        observed = [call.result.leaves[position] for call in self.calls]
        shape = [size_from(values, self.known) for values in zip(*(each.shape for each in observed), strict=True)]
        stride = [
            size_from(values, self.known_strides) for values in zip(*(each.stride for each in observed), strict=True)
        ]
        self._views[leaf] = shape, stride, size_from([each.offset for each in observed], self.known_strides)

    def is_fresh(self, leaf: ObservedTensor) -> bool:
        """Return True if a result has memory of its own, or is treated as if it had."""
        shape, stride, offset = self._views[leaf]
        return leaf.state is None and (leaf.argument is None or None in (*shape, *stride, offset))

    def new(self, position: int) -> _NewTensor | None:
        """Return the tensor that is to be made for a result, if there is one."""
        leaf = self.calls[0].result.leaves[position]
        if self.is_from_data(position):
            return _NewTensor((), (), _DTYPES[type(leaf)], torch.device("cpu"))
        if not isinstance(leaf, ObservedTensor) or not self.is_fresh(leaf):
            return None
        order = tuple(sorted(range(len(leaf.stride)), key=lambda dim: -leaf.stride[dim]))
        return _NewTensor(tuple(self._views[leaf][0]), order, leaf.dtype, leaf.device)

    def view(self, leaf: ObservedTensor) -> Tensor:
        """Return a result that shares the memory of an argument."""
        assert leaf.argument is not None
        argument = self.tensors[leaf.argument]
        call = self.calls[0]
        same = (call.argument_shapes[leaf.argument], call.argument_strides[leaf.argument])
        if (leaf.shape, leaf.stride) == same:
            return argument
        return argument.as_strided(*self._views[leaf])

    def is_from_data(self, position: int) -> bool:
        """Return True for a result that is a number, and differs from run to run as no size explains."""
        values = [call.result.leaves[position] for call in self.calls]
        if type(values[0]) not in _DTYPES or any(type(value) is not type(values[0]) for value in values):
            return False
        return any(value != values[0] for value in values) and size_from(values, self.known) is None

    def size(self, position: int) -> Any:
        """Return a result that is not a tensor; an integer that follows the sizes of the runs is a size."""
        values = [call.result.leaves[position] for call in self.calls]
        if all(type(value) is int for value in values) and any(value != values[0] for value in values):
            return size_from(values, self.known)
        return values[0]


_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}


def _is_alike(call: ObservedCall, other: ObservedCall) -> bool:
    """Return True if two calls of a module have results of one structure."""
    leaves = call.result.leaves, other.result.leaves
    return (
        list(call.result.structure.paths()) == list(other.result.structure.paths())
        and [len(shape) for shape in call.argument_shapes] == [len(shape) for shape in other.argument_shapes]
        and all(_dims(mine) == _dims(theirs) for mine, theirs in zip(*leaves, strict=True))
    )


def _dims(leaf: Any) -> int | None:
    return len(leaf.shape) if isinstance(leaf, ObservedTensor) else None


def _known_sizes(runs: Sequence[Sequence[Sequence[int]]], names: Sequence[Sequence[Any]]) -> list[KnownSize]:
    """Return the sizes that differ from run to run, by their symbols; in a run without symbols by its numbers."""
    concrete = all(isinstance(name, int) for sizes in names for name in sizes)
    found: dict[tuple[int, ...], Any] = {}
    for nth, sizes in enumerate(names):
        for dim, name in enumerate(sizes):
            values = tuple(run[nth][dim] for run in runs)
            if len(set(values)) > 1 and (concrete or not isinstance(name, int)):
                found.setdefault(values, name)
    return [KnownSize(values, name) for values, name in found.items()]


def _with_gradient(leaf: ObservedTensor, tensor: Tensor) -> Tensor:
    if leaf.requires_grad == tensor.requires_grad:
        return tensor
    return tensor.requires_grad_() if leaf.requires_grad else tensor.detach()
