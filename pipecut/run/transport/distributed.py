"""Ranks as processes, over torch.distributed: gloo, NCCL, or any backend with send and receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import LostConnectionError
from ..failure import is_about_connection
from .base import Meta

# Of a pair of ranks. More would only hold memory: a plan never needs a send to be buffered.
_PENDING_SENDS = 16
_ANY = -1  # one of the ranks that a message goes to
_PENDING_BYTES = 32 * 1024 * 1024
# NCCL is not among them: what a pair of ranks sends and receives is one queue, in which each waits for those before it.
# A proven plan has its messages in an order in which that never is a circle.
_TAKES_ANY_ORDER = ("gloo", "mpi", "ucc")


class DistributedTransport:
    """Parcels through a process group: one message per tensor, in the plan's order, which both ends share."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.receives_ahead = _backend(group, device) in _TAKES_ANY_ORDER
        self._sent: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._sizes: dict[int, int] = {}

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        pending = self._sent.setdefault(peer, deque())
        size = self._sizes.get(peer, 0)
        for tensor in tensors:
            value = tensor.detach()
            with _connection_to(peer):
                work = dist.isend(value, group=self.group, group_dst=peer)
            assert work is not None  # this rank is in the group
            pending.append((work, value))
            size += value.nbytes
        while len(pending) > _PENDING_SENDS or (size > _PENDING_BYTES and len(pending) > 1):
            work, value = pending.popleft()
            with _connection_to(peer):
                work.wait()
            size -= value.nbytes
        self._sizes[peer] = size

    def receive(self, peer: int, metas: Sequence[Meta]) -> _Posted:
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=self.device) for meta in metas]
        with _connection_to(peer):
            works = [dist.irecv(tensor, group=self.group, group_src=peer) for tensor in tensors]
        return _Posted(peer, works, tensors)

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        if self.ranks == 1:
            assert numbers is not None
            return numbers
        shared = torch.tensor(numbers if numbers is not None else [0] * count, dtype=torch.int64, device=self.device)
        with _connection_to(source if source != self.rank else _ANY):
            dist.broadcast(shared, group=self.group, group_src=source)
        return shared.tolist()

    def finish(self) -> None:
        for peer, pending in self._sent.items():
            while pending:
                with _connection_to(peer):
                    pending.popleft()[0].wait()
        self._sizes.clear()

    def clear(self) -> None:
        """Do nothing: a step that failed has closed the connections."""


class _Posted:
    """Receives that are under way."""

    def __init__(self, peer: int, works: list[dist.Work | None], tensors: list[Tensor]) -> None:
        self.peer = peer
        self.works = works
        self.tensors = tensors

    def wait(self) -> list[Tensor]:
        # Once only: gloo waits forever if a receive that is done is waited for again.
        works, self.works = self.works, []
        for work in works:
            assert work is not None  # this rank is in the group
            with _connection_to(self.peer):
                work.wait()
        return self.tensors


class _connection_to:  # noqa: N801 - reads like a function; a generator would cost more than the call that it guards
    """Turn a broken connection into an error that names the other rank."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_about_connection(error):
            raise LostConnectionError(self.peer, error) from error


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the backend of a group for the tensors of a device."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "")
