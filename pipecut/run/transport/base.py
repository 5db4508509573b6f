"""How tensors get from rank to rank: what the executor asks of a transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...stage import MeshLayout, describe, local_part


class Meta(NamedTuple):
    """What has to be known of a tensor to receive it. A DTensor is sent as its local part, whose shape this is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_mesh: MeshLayout | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """The meta of a tensor at hand."""
        return cls(tuple(local_part(tensor).shape), tensor.dtype, tensor.requires_grad, MeshLayout.of(tensor))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor, of a DTensor that of all ranks together."""
        return self.shape if self.on_mesh is None else self.on_mesh.shape

    @property
    def of_gradient(self) -> Meta:
        """The meta of its gradient."""
        return self if self.on_mesh is None else self._replace(on_mesh=self.on_mesh.of_gradient)

    @property
    def bytes(self) -> int:
        """The size of what is sent."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return describe(self.whole_shape, self.dtype, self.on_mesh)


class Arrival(Protocol):
    """A parcel on its way to this rank."""

    def wait(self) -> list[Tensor]:
        """The tensors, when they are here."""


class Transport(Protocol):
    """Parcels between this rank and others. Those of a pair of ranks arrive in the order in which they were sent."""

    rank: int
    ranks: int
    receives_ahead: bool  # whether a receive may be posted before sends and receives that the plan has before it

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send without waiting; the tensors must not change until they are gone."""

    def receive(self, peer: int, metas: Sequence[Meta]) -> Arrival:
        """Get ready for a parcel."""

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        """Numbers of one rank, on all ranks; `numbers` is None elsewhere."""

    def finish(self) -> None:
        """Wait until everything that was sent is gone; called at the end of a step."""

    def clear(self) -> None:
        """Drop what a step that failed has left, if the rank goes on; called where all ranks are in one process."""


class Ready:
    """A parcel that needed no transport, or that has arrived."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors
