"""All ranks in one process: parcels are handed over as they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ...errors import PipeError
from .base import Meta, Ready


class ParcelQueues:
    """Parcels between all ranks of one process, in the order of sending, and the numbers that a rank shares."""

    def __init__(self) -> None:
        self.parcels: dict[tuple[int, int], deque[list[Tensor]]] = {}
        self.numbers: list[int] = []

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self.parcels.clear()


class InProcessTransport:
    """Transport of one rank, through the queues of its process."""

    def __init__(self, queues: ParcelQueues, rank: int, ranks: int) -> None:
        self.queues = queues
        self.rank = rank
        self.ranks = ranks
        self.receives_ahead = False

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        # A copy, as over a network: a receiver that writes to what it got must not change the sender's tensor.
        parcel = [tensor.detach().clone() for tensor in tensors]
        self.queues.parcels.setdefault((self.rank, peer), deque()).append(parcel)

    def receive(self, peer: int, metas: Sequence[Meta]) -> Ready:
        # All ranks take turns in an order in which a send comes before its receive.
        parcels = self.queues.parcels.get((peer, self.rank))
        if not parcels:
            raise PipeError(f"rank {self.rank} waits for a parcel that rank {peer} has not sent")
        parcel = parcels.popleft()
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in parcel]
        expected = [(meta.shape, meta.dtype) for meta in metas]
        if got != expected:
            raise PipeError(f"rank {self.rank} expects {expected} from rank {peer}, and gets {got}")
        return Ready(parcel)

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        if self.rank == source:
            assert numbers is not None
            self.queues.numbers = numbers
        return self.queues.numbers

    def finish(self) -> None: ...

    def clear(self) -> None:
        self.queues.clear()
