"""Ranks as processes on one host, with their tensors in its memory: no backend of torch.distributed takes part."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...errors import LostConnectionError, PipeError
from ..failure import ANY_RANK
from .base import Meta
from .channel import NUMBERS, PARCEL, Channel, aligned
from .host import HostChannels

_CPU = torch.device("cpu")
_NUMBER = 8  # bytes of an integer or a float


class SharedMemoryTransport:
    """Parcels through channels of the host: one message for each, in the plan's order."""

    def __init__(self, channels: HostChannels, timeout: timedelta) -> None:
        self.channels = channels
        self.rank, self.ranks = channels.rank, channels.ranks
        self.receives_ahead = False  # there is nothing to gain: a message does not wait for its receive
        self._of = channels.of
        self._seconds = timeout.total_seconds()

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        ready = [each if _lies_in_memory(each) else _in_memory(each) for each in tensors]
        self._of[peer].send(PARCEL, [(each.data_ptr(), each.nbytes) for each in ready], self._seconds)

    def receive(self, peer: int, metas: Sequence[Meta]) -> _Parcel:
        channel = self._of[peer]
        parcel = _Parcel(channel, metas, self._seconds)
        channel.expect(parcel)
        return parcel

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        if numbers is None:
            return self._numbers_from(source, _Numbers("q", count))
        self._send_to_all(array.array("q", numbers))
        return numbers

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks, which all call this at the same time.

        The first rank adds up: that of the first stage, whose last backward mostly ends a step.
        """
        if self.rank != 0:
            self._send(0, array.array("d", numbers))
            try:
                return self._numbers_from(0, _Numbers("d", len(numbers)))
            except LostConnectionError as error:  # it waits for others
                raise LostConnectionError(ANY_RANK, error) from error
        sums = list(numbers)
        for rank in self._of:
            others = self._numbers_from(rank, _Numbers("d", len(numbers)))
            sums = [a + b for a, b in zip(sums, others, strict=True)]
        self._send_to_all(array.array("d", sums))
        return sums

    def _send_to_all(self, numbers: array.array[Any]) -> None:
        for rank in self._of:
            self._send(rank, numbers)

    def _send(self, rank: int, numbers: array.array[Any]) -> None:
        address, count = numbers.buffer_info()
        self._of[rank].send(NUMBERS, [(address, _NUMBER * count)], self._seconds)

    def _numbers_from(self, rank: int, numbers: _Numbers) -> list[Any]:
        self._of[rank].expect(numbers)
        self._of[rank].wait_for(numbers, self._seconds)
        return numbers.values.tolist()

    def finish(self) -> None:
        """Do nothing: what was sent is copied, and on its way."""

    def clear(self) -> None:
        """Do nothing: a step that failed has shut the channels down."""


class _Parcel:
    """A parcel on its way to this rank."""

    content = PARCEL

    def __init__(self, channel: Channel, metas: Sequence[Meta], seconds: float) -> None:
        self.size = sum([aligned(meta.bytes) for meta in metas])
        self.is_here = False
        self._channel = channel
        self._metas = metas
        self._seconds = seconds
        self._tensors: list[Tensor] = []

    def take(self, address: int) -> None:
        for meta in self._metas:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=_CPU)
            size = tensor.nbytes
            ctypes.memmove(tensor.data_ptr(), address, size)
            address += aligned(size)
            self._tensors.append(tensor)
        self.is_here = True

    def wait(self) -> list[Tensor]:
        if not self.is_here:
            self._channel.wait_for(self, self._seconds)
        return self._tensors


class _Numbers:
    """Numbers on their way to this rank."""

    content = NUMBERS

    def __init__(self, kind: str, count: int) -> None:
        self.size = aligned(_NUMBER * count)
        self.is_here = False
        self.values: array.array[Any] = array.array(kind)  # integers if it is "q", floats if it is "d"
        self._bytes = _NUMBER * count

    def take(self, address: int) -> None:
        self.values.frombytes(ctypes.string_at(address, self._bytes))
        self.is_here = True


def _lies_in_memory(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor are the bytes at its address, in their order."""
    return type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()


def _in_memory(tensor: Tensor) -> Tensor:
    """Return another tensor as one whose elements lie in memory: the result of a collective is waited for."""
    value = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not _lies_in_memory(value):
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise PipeError(
            f"a stage on the CPU made a {kind}, which is to be sent to another rank: let its module return plain "
            "tensors on the stage's device"
        )
    return value
