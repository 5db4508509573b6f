"""Stages under DistributedDataParallel or replicate(): gradients are averaged once, after the last backward of a step.

Its reducer works during a backward, when it has seen a gradient for every parameter. So all backwards of a step run as
under `no_sync`. Then the reducer is notified that all gradients are complete, and does its work with buckets and hooks.
`replicate()` is a DistributedDataParallel over the parameters only, out of sight, which its first forward makes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ...errors import InputError
from ...text import listed
from ...torch_internals import (
    REPLICATE_CLASS,
    ReplicateState,
    average_static_graph,
    averaged_parameters,
    hold_static_graph,
    hook_based_options,
    mark_ready,
    static_graph_has_run,
)
from ..dtensor import is_distributed
from .base import Replica, Wrapper, WrapperClass

_STATIC_GRAPH = "_pipecut_static_graph"


class _Copies(Replica):
    """A module of which some parts, or all of it, are under DistributedDataParallel or replicate()."""

    is_reduced = True

    def __init__(self, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        copied = [_Wrapped(part) if isinstance(part, DistributedDataParallel) else _Replicated(part) for part in parts]
        for part, each in zip(parts, copied, strict=True):
            _check_plain(part, each.called)
        self._averages = [_Average(each) for each in copied]
        self.groups = [each.group for each in copied]

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for average in self._averages:
                average.before_forward()
                stack.enter_context(average.copied.without_average())
            yield

    def reduce_gradients(self) -> None:
        for average in self._averages:
            average.run()


class _Average:
    """The average of the gradients of one DistributedDataParallel."""

    def __init__(self, copied: _Copied) -> None:
        self.copied = copied
        self._static: _StaticGraph | None = None
        if isinstance(copied, _Wrapped):
            self.module  # noqa: B018 - made now, so that what does not fit raises before the first step

    @functools.cached_property
    def module(self) -> DistributedDataParallel:
        """The wrapper. That of replicate() is made by the first forward, when the parameters are on their device."""
        module = self.copied.wrapper
        _check_options(module, self.copied.called)
        self._parameters = _parameters_of(self.copied)
        self._static = _StaticGraph.of(module, self._parameters) if module.static_graph else None
        return module

    def before_forward(self) -> None:
        if self.module.static_graph and self._static is not None:
            self._static.before_forward()

    def run(self) -> None:
        """Average, unless the user's `no_sync` is in force."""
        module = self.module
        if not self.copied.averages:
            return
        self._check_none_unfrozen()
        unused = {name for name, parameter in self._parameters.items() if parameter.grad is None}
        if self._static is None or not self._static.average_first_step():
            self._reduce()
        # As after a forward with synchronisation: the next one begins with the buffers of the first copy.
        module.require_forward_param_sync = True
        # Only now: a copy that stayed away from the average would leave the others waiting.
        self._check_use(unused)

    @property
    def _finds_unused(self) -> bool:
        return bool(self.module.find_unused_parameters) and self._static is None

    def _reduce(self) -> None:
        reducer: Any = self.module.reducer
        parameters = list(self._parameters.values())
        ready = self._ready(parameters)
        seen = [parameters[number] for number in ready]
        start = torch.zeros((), device=self.module.device, requires_grad=True)
        with torch.enable_grad():
            end = _AllReady.apply(start, reducer, ready, *seen)  # type: ignore[no-untyped-call]
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([end] if self._finds_unused else [])
        torch.autograd.grad(end, start)

    def _ready(self, parameters: Sequence[Tensor]) -> Sequence[int]:
        """Return the numbers of the parameters whose gradients the reducer waits for."""
        if self._static is not None:
            return self._static.awaited
        if not self._finds_unused:
            return range(len(parameters))
        # The reducer looks for them in the graph, and takes those that it does not find for ready, once it saw any.
        trained = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
        return [number for number in trained if parameters[number].grad is not None] or trained[:1]

    def _check_none_unfrozen(self) -> None:
        known = {id(parameter) for parameter in self._parameters.values()}
        called = self.copied.called
        for name, parameter in self.copied.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise InputError(
                    f"{name} was frozen when {called} was made, which does not average it: "
                    f"unfreeze parameters before, or make {called} and the stage anew"
                )

    def _check_use(self, unused: set[str]) -> None:
        changed = sorted(set() if self._static is None else self._static.unused_anywhere - unused)
        if changed:
            raise InputError(
                f"{listed(changed, at_most=5)} got a gradient now and none in the first step; {self.copied.called} "
                "with "
                "static_graph=True does not average it: use find_unused_parameters=True instead"
            )
        missing = sorted(unused if self._static is None else unused - self._static.unused_here)
        if missing and not self._finds_unused:
            raise InputError(
                f"{listed(missing, at_most=5)} got no gradient in this step: give {self.copied.called} "
                "find_unused_parameters=True, or freeze what the stage does not use before making it"
            )


class _AllReady(torch.autograd.Function):
    """An operation on parameters, whose backward notifies a reducer that their gradients are complete.

    The reducer insists on a backward, and looks in its graph for parameters. They are not part of it, for then their
    hooks would be called once more.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, reducer: Any, ready: Sequence[int], *parameters: Tensor) -> Tensor:
        ctx.reducer, ctx.ready, ctx.inputs = reducer, ready, 3 + len(parameters)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for number in ctx.ready:
            mark_ready(ctx.reducer, number)
        return (gradient, *(None,) * (ctx.inputs - 1))


def _parameters_of(copied: _Copied) -> dict[str, Tensor]:
    """Return the averaged parameters, in the order of the wrapper."""
    parameters = {name: parameter for name, parameter in copied.named_parameters() if parameter.requires_grad}
    averaged = averaged_parameters(copied.wrapper)
    if len(parameters) != averaged:
        raise InputError(
            f"{copied.called} was made with {averaged} parameters to train, and {len(parameters)} are to be "
            "trained now: freeze and unfreeze parameters before"
        )
    return parameters


def _check_plain(part: nn.Module, called: str) -> None:
    """Raise on layers that are divided over other ranks: the reducer would average their local parts at best."""
    divided = [name for name, parameter in part.named_parameters() if is_distributed(parameter)]
    if divided:
        raise InputError(
            f"{listed(divided, at_most=3)} are DTensors, which {called} does not average: put stages that "
            "parallelize_module has divided under fully_shard, with the mesh of the data-parallel ranks"
        )


def _check_options(module: DistributedDataParallel, called: str) -> None:
    """Raise on options with which gradients are averaged by hooks of their own, in every backward."""
    for name, used in hook_based_options(module).items():
        if used:
            raise InputError(
                f"{called} with {name} averages in every backward, and a stage has many in a step: "
                "leave it out. For lower precision use autocast, or fully_shard with a MixedPrecisionPolicy"
            )


class _Copied(Protocol):
    """A copied module: the common view of DistributedDataParallel and replicate()."""

    called: str  # the name that the user knows

    @property
    def group(self) -> dist.ProcessGroup:
        """The group over which it is copied."""

    @property
    def wrapper(self) -> DistributedDataParallel:
        """The wrapper that averages, made now if it does not exist yet."""

    @property
    def averages(self) -> bool:
        """False inside the user's `no_sync`."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that the wrapper manages, by their names in the user's module."""

    def without_average(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward after whose backward gradients are not averaged."""


class _Wrapped:
    """A module inside a DistributedDataParallel."""

    called = "DistributedDataParallel"

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper
        self.group: dist.ProcessGroup = wrapper.process_group

    @property
    def averages(self) -> bool:
        return bool(self.wrapper.require_backward_grad_sync)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.wrapper.module.named_parameters():
            if name not in self.wrapper.parameters_to_ignore:
                yield name, parameter

    def without_average(self) -> contextlib.AbstractContextManager[None]:
        return self.wrapper.no_sync()


class _Replicated(ReplicateState):
    """A module that was given to `replicate()`."""

    called = "replicate()"


class _StaticGraph:
    """Knowledge that the reducer of a DistributedDataParallel with static_graph=True learns in its first step.

    It counts then how often each parameter gets a gradient, and waits for as many in every later step. A first step of
    a pipeline has those of all microbatches. `awaited` has the number of each parameter as often as it is awaited.
    """

    def __init__(self, module: Any, parameters: Mapping[str, Tensor]) -> None:
        if static_graph_has_run(module):
            raise InputError(
                "DistributedDataParallel with static_graph=True has run outside of the pipeline, and expects each step "
                "to be like that: make it anew for the stage"
            )
        self.awaited: list[int] = []
        self.unused_here: set[str] = set()  # in the first step; what another copy uses is averaged nevertheless
        self.unused_anywhere: set[str] = set()
        self._is_first_step = True
        self._is_counting = False
        self._counters: list[RemovableHandle] = []
        self._module = module
        self._parameters = parameters

    @classmethod
    def of(cls, module: DistributedDataParallel, parameters: Mapping[str, Tensor]) -> _StaticGraph:
        """Return that of a module, which may be in several stages one after the other."""
        known: _StaticGraph | None = module.__dict__.get(_STATIC_GRAPH)
        if known is None:
            known = module.__dict__[_STATIC_GRAPH] = cls(module, parameters)
        return known

    def before_forward(self) -> None:
        """Begin to count with the reducer, and keep it from averaging after the first backward."""
        if self._is_first_step and not self._is_counting:
            self._is_counting = True
            hold_static_graph(self._module)
            for number, parameter in enumerate(self._parameters.values()):
                count = functools.partial(self._count, number)
                handle = parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
                self._counters.append(handle)

    def _count(self, number: int, _: Tensor) -> None:
        self.awaited.append(number)

    def average_first_step(self) -> bool:
        """Average in the way of a first step; return False if this is a later one."""
        if not self._is_first_step:
            return False
        self._is_first_step = False
        for counter in self._counters:
            counter.remove()
        self.unused_here = self._without_gradient()
        average_static_graph(self._module)
        self.unused_anywhere = self._without_gradient()
        return True

    def _without_gradient(self) -> set[str]:
        return {name for name, parameter in self._parameters.items() if parameter.grad is None}


COPIES = Wrapper(
    (
        WrapperClass("torch.nn.parallel", "DistributedDataParallel", _Wrapped.called),
        WrapperClass(*REPLICATE_CLASS, _Replicated.called),
    ),
    _Copies,
)
