"""What averages the gradients of a copied module: DistributedDataParallel around it, or `replicate()` on it.

The latter is a DistributedDataParallel over the parameters only, out of sight, which its first forward makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


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
