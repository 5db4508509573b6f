"""Ranks as processes, over torch.distributed: gloo, NCCL, or any backend with send and receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import LostConnectionError
from ..failure import ANY_RANK, backends, is_about_connection
from .base import Meta

# Of a pair of ranks. More would only hold memory: a plan never needs a send to be buffered.
_PENDING_SENDS = 16
_PENDING_BYTES = 32 * 1024 * 1024
# NCCL is not among them: what a pair of ranks sends and receives is one queue, in which each waits for those before it.
# A proven plan has its messages in an order in which that never is a circle.
_TAKES_ANY_ORDER = ("gloo", "mpi", "ucc")


class DistributedTransport:
    """Parcels through a process group: one message per tensor, in the plan's order, which both ends share."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None = None) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.receives_ahead = backends(group).get(device.type, "") in _TAKES_ANY_ORDER
        self.numbers_device = device_of_numbers(group, device)
        self._timeout = timeout
        # With others, such as NCCL, a transfer waits on the device, and the host would wait for it only to count.
        self._waits = (timeout,) if self.receives_ahead and timeout is not None else ()
        self._sent: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._sizes: dict[int, int] = {}

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        pending = self._sent.setdefault(peer, deque())
        size = self._sizes.get(peer, 0)
        for tensor in tensors:
            value = tensor.detach()
            with connection_to(peer):
                work = dist.isend(value, group=self.group, group_dst=peer)
            assert work is not None  # this rank is in the group
            pending.append((work, value))
            size += value.nbytes
        while len(pending) > _PENDING_SENDS or (size > _PENDING_BYTES and len(pending) > 1):
            work, value = pending.popleft()
            with connection_to(peer):
                work.wait(*self._waits)
            size -= value.nbytes
        self._sizes[peer] = size

    def receive(self, peer: int, metas: Sequence[Meta]) -> _Posted:
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=self.device) for meta in metas]
        with connection_to(peer):
            works = [dist.irecv(tensor, group=self.group, group_src=peer) for tensor in tensors]
        return _Posted(peer, works, tensors, self._waits)

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        if self.ranks == 1:
            assert numbers is not None
            return numbers
        values = numbers if numbers is not None else [0] * count
        shared = torch.tensor(values, dtype=torch.int64, device=self.numbers_device)
        with connection_to(source if source != self.rank else ANY_RANK):
            wait_for(dist.broadcast(shared, group=self.group, group_src=source, async_op=True), self._timeout)
        return shared.tolist()

    def finish(self) -> None:
        for peer, pending in self._sent.items():
            while pending:
                with connection_to(peer):
                    pending.popleft()[0].wait(*self._waits)
        self._sizes.clear()

    def clear(self) -> None:
        """Do nothing: a step that failed has closed the connections."""


class _Posted:
    """Receives that are under way."""

    def __init__(
        self, peer: int, works: list[dist.Work | None], tensors: list[Tensor], waits: tuple[timedelta, ...]
    ) -> None:
        self.peer = peer
        self.waits = waits
        self.works = works
        self.tensors = tensors

    def wait(self) -> list[Tensor]:
        # Once only: gloo waits forever if a receive that is done is waited for again.
        works, self.works = self.works, []
        for work in works:
            assert work is not None  # this rank is in the group
            with connection_to(self.peer):
                work.wait(*self.waits)
        return self.tensors


class connection_to:  # noqa: N801 - reads like a function; a generator would cost more than the call that it guards
    """Turn a broken connection into an error that names the other rank."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_about_connection(error):
            raise LostConnectionError(self.peer, error) from error


def device_of_numbers(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return where numbers for the host are exchanged: on the CPU if the group can, so that no device is waited for."""
    return torch.device("cpu") if "cpu" in backends(group) else device


def wait_for(work: dist.Work | None, timeout: timedelta | None) -> None:
    """Wait until a collective is done on this rank, whose result the host needs."""
    assert work is not None  # this rank is in the group
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
