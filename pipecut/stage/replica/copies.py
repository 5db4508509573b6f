"""Stages under DistributedDataParallel or replicate(): gradients are averaged once, after the last backward of a step.

Its reducer works during a backward, when it has seen a gradient for every parameter. So all backwards of a step run as
under `no_sync`. Then the reducer is told that all gradients are there, and does its work: buckets, hooks and all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...errors import InputError
from ...text import listed
from .replica import Alone
from .replicated import Copied, StaticGraph, Wrapped


class Copies(Alone):
    """A module of which some parts, or all of it, are under DistributedDataParallel or replicate()."""

    is_reduced = True

    def __init__(self, modules: Sequence[Copied]) -> None:
        self._averages = [_Average(module) for module in modules]
        self.groups = [module.group for module in modules]

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

    def __init__(self, copied: Copied) -> None:
        self.copied = copied
        self._static: StaticGraph | None = None
        if isinstance(copied, Wrapped):
            self.module  # noqa: B018 - looked at now, so that what does not fit is refused before the first step

    @cached_property
    def module(self) -> DistributedDataParallel:
        """The wrapper. That of replicate() is made by the first forward, when the parameters are on their device."""
        module = self.copied.wrapper
        _refuse_unusual(module, self.copied.called)
        self._parameters = _parameters_of(self.copied)
        self._static = StaticGraph.of(module, self._parameters) if module.static_graph else None
        return module

    def before_forward(self) -> None:
        if self.module.static_graph and self._static is not None:
            self._static.before_forward()

    def run(self) -> None:
        """Average, unless the user's `no_sync` is in force."""
        module = self.module
        if not self.copied.averages:
            return
        self._refuse_unfrozen()
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
        """The numbers of the parameters whose gradients the reducer waits for."""
        if self._static is not None:
            return self._static.awaited
        if not self._finds_unused:
            return range(len(parameters))
        # It looks for them in the graph, and takes what it does not find for ready, once it has seen anything.
        trained = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
        return [number for number in trained if parameters[number].grad is not None] or trained[:1]

    def _refuse_unfrozen(self) -> None:
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
    """An operation on parameters, whose backward tells a reducer that their gradients are there.

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
            ctx.reducer._autograd_hook(number)
        return (gradient, *(None,) * (ctx.inputs - 1))


def _parameters_of(copied: Copied) -> dict[str, Tensor]:
    """Those that are averaged, in the order of the wrapper."""
    parameters = {name: parameter for name, parameter in copied.named_parameters() if parameter.requires_grad}
    averaged = copied.wrapper._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
    if len(parameters) != averaged:
        raise InputError(
            f"{copied.called} was made with {averaged} parameters to train, and {len(parameters)} are to be "
            "trained now: freeze and unfreeze parameters before"
        )
    return parameters


def _refuse_unusual(module: DistributedDataParallel, called: str) -> None:
    """Options with which gradients are averaged by hooks of their own, in every backward."""
    unusual = {
        "mixed_precision": module.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(module._delay_all_reduce_params),
        "the python reducer of torch.compile": module._use_python_reducer,
    }
    for name, used in unusual.items():
        if used:
            raise InputError(
                f"{called} with {name} averages in every backward, and a stage has many in a step: "
                "leave it out. For lower precision use autocast, or fully_shard with a MixedPrecisionPolicy"
            )
