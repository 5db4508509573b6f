"""Stages under fully_shard: parameters are gathered when the plan says so, gradients reduced once per step.

fully_shard gathers, reduces and frees in hooks around forward and backward. During a step they only add up gradients.
After the last backward, an empty forward and backward call the hooks once more, and those do all the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_internals import fsdp_mesh_infos
from .base import Replica, Wrapper, WrapperClass

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, UnshardHandle


_HooksOnlyForward = Callable[[Tensor], Tensor]


class _Shards(Replica):
    """A module of which some parts, or all of it, are under fully_shard, or replicate of the same family.

    The user's settings of gradient sync and of resharding hold outside steps only.
    """

    is_reduced = True

    def __init__(self, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        self._parts = [cast("FSDPModule", part) for part in parts]
        for part in self._parts:
            part.reshard()
        self._module = module
        self._hooks_only_forwards = [_hooks_only_forward(root) for root in _roots(module)]
        self._dtypes = [parameter.dtype for parameter in module.parameters()]
        self._sharding_parts = [part for part in self._parts if any(map(_shards, fsdp_mesh_infos(part)))]
        groups = [
            group for part in self._parts for info in fsdp_mesh_infos(part) for group in info.mesh.get_all_groups()
        ]
        self.groups = list({group.group_name: group for group in groups}.values())
        self._handles: list[UnshardHandle | None] = []
        self._is_planned = False
        self._accumulates = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        self._accumulate()
        yield

    @contextlib.contextmanager
    def weight_backward(self) -> Iterator[None]:
        self._accumulate()
        for part in self._parts:
            part.unshard()
        casts = self._casts
        yield
        if casts:
            # Gradients that are added up in a higher precision have to be taken over after each microbatch.
            self._call_hooks()

    def unshard(self) -> None:
        if not self._is_planned:
            # From now on the plan decides when to reshard, not every forward by itself.
            self._is_planned = True
            for part in self._sharding_parts:
                part.set_reshard_after_forward(False, recurse=False)
        self._handles = [part.unshard(async_op=True) for part in self._parts]

    def reshard(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.wait()
        self._handles = []
        for part in self._parts:
            part.reshard()

    def reduce_gradients(self) -> None:
        for group in self.groups:
            if dist.get_backend(group) == "gloo":
                # Its reduce_scatter waits forever on a connection that was closed before; its barrier does not.
                dist.barrier(group)
        self._accumulates = False
        self._set_last_backward(True)
        self._call_hooks()

    @cached_property
    def _casts(self) -> bool:
        """True if the parameters, which are gathered now, have another dtype than their shards."""
        return [parameter.dtype for parameter in self._module.parameters()] != self._dtypes

    def _accumulate(self) -> None:
        if not self._accumulates:
            self._accumulates = True
            self._set_last_backward(False)

    def _set_last_backward(self, last: bool) -> None:
        for part in self._parts:
            part.set_is_last_backward(last)
            part.set_requires_gradient_sync(last, recurse=False)
            part.set_reshard_after_backward(last, recurse=False)

    def _call_hooks(self) -> None:
        device = next(self._module.parameters()).device  # which to_empty() may have changed since
        for forward in self._hooks_only_forwards:
            with torch.enable_grad():
                end = forward(torch.zeros((), device=device, requires_grad=True))
            end.backward()  # type: ignore[no-untyped-call]


def _roots(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost parts: the hooks of each manage all parts inside it."""
    from torch.distributed.fsdp import FSDPModule  # slow to import, and imported by now

    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots(child)


def _hooks_only_forward(root: nn.Module) -> _HooksOnlyForward:
    """Return a forward of the module that runs nothing but the hooks of fully_shard before and after it."""
    from torch.distributed.fsdp import register_fsdp_forward_method  # slow to import, and imported by now

    name = "_pipecut_hooks_only_forward"
    setattr(root, name, torch.clone)
    register_fsdp_forward_method(root, name)
    forward = cast(_HooksOnlyForward, getattr(root, name))
    delattr(root, name)
    return forward


def _shards(mesh_info: Any) -> bool:
    """Return True if parameters are in pieces; under replicate they are not."""
    return mesh_info.shard_mesh_dim is not None


SHARDS = Wrapper((WrapperClass("torch.distributed.fsdp", "FSDPModule", "fully_shard"),), _Shards)
