"""The protocol of a transport: everything that the executor asks of it.

A transport is one class with the methods of `Transport`, and nothing else has to know it: pass a function that makes
one, `transport=lambda rank, ranks: MyTransport(rank, ranks)`, to a schedule. It is called once for each rank that is in
this process. Without it there are three (selection.py): queues for ranks that are all in one process
(in_process.py), shared memory for processes on one host whose stages are on the CPU (shared_memory.py), and
torch.distributed for all others (distributed.py). Reports of failures go over the store of the process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...stage import MeshLayout, describe, local_part


class Meta(NamedTuple):
    """The facts that are needed to receive a tensor. A DTensor is sent as its local part, whose shape this is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_mesh: MeshLayout | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return the meta of a tensor."""
        return cls(tuple(local_part(tensor).shape), tensor.dtype, tensor.requires_grad, MeshLayout.of(tensor))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor, of a DTensor that of all ranks together."""
        return self.shape if self.on_mesh is None else self.on_mesh.shape

    @property
    def bytes(self) -> int:
        """The size of what is sent."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return describe(self.whole_shape, self.dtype, self.on_mesh)


class Arrival(Protocol):
    """Parcel in transit to this rank."""

    def wait(self) -> list[Tensor]:
        """Return the tensors, when they are here; called once. They belong to the caller, who may change them."""


class Transport(Protocol):
    """Connection of one rank to all others.

    A parcel is a list of tensors that belong together. Parcels from one rank to another arrive in the order in which
    they were sent; a plan is proven to have its sends and receives in an order in which no rank waits forever, even if
    every send waits for its receive.
    """

    rank: int
    ranks: int
    receives_ahead: bool  # True if a receive may be posted before sends and receives that the plan has before it

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send a parcel, without waiting for its receiver. The tensors are contiguous, and do not change any more.

        They may be part of an autograd graph: detach what is copied or kept.
        """

    def receive(self, peer: int, metas: Sequence[Meta]) -> Arrival:
        """Begin to receive a parcel of tensors with these shapes and dtypes, on the device of the receiving stage."""

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        """Return the numbers that rank `source` passes, on all ranks; the others pass None, and know their `count`.

        All ranks call it in the same order. Where all ranks are in one process, the answer of the last one counts.
        """

    def finish(self) -> None:
        """Wait until everything that was sent is gone; called at the end of a step."""

    def clear(self) -> None:
        """Drop what a step that failed has left, if the rank goes on; called where all ranks are in one process."""


TransportFactory = Callable[[int, int], Transport]  # makes that of a rank, from its number and the number of ranks


class Ready:
    """A parcel that needed no transport, or that has arrived."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors
