"""What averages the gradients of a copied module: DistributedDataParallel around it, or `replicate()` on it.

The latter is a DistributedDataParallel over the parameters only, out of sight, which its first forward makes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ...errors import InputError


class Copied(Protocol):
    """A module that is copied."""

    called: str  # what the user knows it by

    @property
    def group(self) -> dist.ProcessGroup:
        """Over which it is copied."""

    @property
    def wrapper(self) -> DistributedDataParallel:
        """What averages; made now, if it is not there yet."""

    @property
    def averages(self) -> bool:
        """Whether the user wants gradients to be averaged."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What the wrapper looks after, by the names in the module of the user."""

    def without_average(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward after whose backward gradients are not averaged."""


class Wrapped:
    """A module inside of a DistributedDataParallel."""

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


class Replicated:
    """A module that was given to `replicate()`."""

    called = "replicate()"

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed._composable.replicate import replicate

        # Nothing public tells the group, nor makes the wrapper.
        self._state: Any = replicate.state(module)

    @property
    def group(self) -> dist.ProcessGroup:
        if self._state.has_initialized:
            return self._state._ddp.process_group  # type: ignore[no-any-return]
        options = self._state._init_kwargs
        mesh, group = options.get("device_mesh"), options.get("process_group")
        found = mesh.get_group() if mesh is not None else group if group is not None else dist.group.WORLD
        assert isinstance(found, dist.ProcessGroup)  # torch.distributed is initialised
        return found

    @property
    def wrapper(self) -> DistributedDataParallel:
        if not self._state.has_initialized:
            self._state.lazy_init()
        return self._state._ddp  # type: ignore[no-any-return]

    @property
    def averages(self) -> bool:
        return not self._state._no_sync

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from zip(self._state._param_names, self._state._param_list, strict=True)

    @contextlib.contextmanager
    def without_average(self) -> Iterator[None]:
        before, self._state._no_sync = self._state._no_sync, True
        try:
            yield
        finally:
            self._state._no_sync = before


# MERGED: DistributedDataParallel with static_graph=True: it learns in its first step what to expect in the others.
# MERGED:
# MERGED: Its reducer counts then how often each parameter gets a gradient, and waits for as many in every later
# MERGED: step. A first
# MERGED: step of a pipeline has that of all microbatches.


_ATTRIBUTE = "_pipecut_static_graph"


class StaticGraph:
    """What one reducer has learnt; `awaited` has the number of each parameter as often as it waits for it."""

    def __init__(self, module: Any, parameters: Mapping[str, Tensor]) -> None:
        if module._static_graph_delay_allreduce_enqueued:
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
    def of(cls, module: DistributedDataParallel, parameters: Mapping[str, Tensor]) -> StaticGraph:
        """The one of a module, which may be in several stages one after the other."""
        known: StaticGraph | None = module.__dict__.get(_ATTRIBUTE)
        if known is None:
            known = module.__dict__[_ATTRIBUTE] = cls(module, parameters)
        return known

    def before_forward(self) -> None:
        """Begin to count with the reducer, and keep it from averaging after the first backward."""
        if self._is_first_step and not self._is_counting:
            self._is_counting = True
            self._module._static_graph_delay_allreduce_enqueued = True
            for number, parameter in enumerate(self._parameters.values()):
                count = functools.partial(self._count, number)
                handle = parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
                self._counters.append(handle)

    def _count(self, number: int, _: Tensor) -> None:
        self.awaited.append(number)

    def average_first_step(self) -> bool:
        """Average in the way of a first step, if this is one."""
        if not self._is_first_step:
            return False
        self._is_first_step = False
        for counter in self._counters:
            counter.remove()
        self.unused_here = self._without_gradient()
        reducer = self._module.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        reducer._delay_all_reduce()
        self.unused_anywhere = self._without_gradient()
        return True

    def _without_gradient(self) -> set[str]:
        return {name for name, parameter in self._parameters.items() if parameter.grad is None}
