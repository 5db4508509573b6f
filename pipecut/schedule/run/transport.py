"""How tensors get from rank to rank: what the executor asks of a transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Meta(NamedTuple):
    """What has to be known of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """The meta of a tensor at hand."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


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
        """Wait until everything that was sent is gone."""


class Ready:
    """A parcel that needed no transport, or that has arrived."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors
