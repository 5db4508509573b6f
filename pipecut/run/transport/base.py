"""The protocol of a transport; the one between ranks of one process; and the clock that is put around any of them.

A transport is one class with the methods of `Transport`, and nothing else has to know it: pass a function that makes
one, `transport=lambda rank, ranks: MyTransport(rank, ranks)`, to a schedule. It is called once for each rank that is in
this process. Without it there are three (selection.py): queues for ranks that are all in one process (here), shared
memory for processes on one host whose stages are on the CPU (shared_memory.py), and torch.distributed for all others
(distributed.py). Reports of failures go over the store of the process group.

A transport of any kind is timed in one place, so that no wait for another rank is forgotten. Two readings of the clock
for each message are all that it costs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import PipeError
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


_Reading = Any  # of a clock: nanoseconds of the host, or an event of a device
Interval = tuple[_Reading, _Reading]
Turn = tuple[int, Interval]  # of a rank, where all of them are in one process: one computes, and the others wait


class Clock(Protocol):
    """Clock of a rank; `now` costs next to nothing, and `seconds` is asked after the step."""

    is_late: bool  # True if the time between two readings is not known until the device has come so far
    now: Callable[[], _Reading]

    def seconds(self, interval: Interval) -> float:
        """Return the time between two readings."""


class HostClock:
    """Clock of a CPU, which computes while the host waits for it."""

    is_late = False
    now = staticmethod(time.perf_counter_ns)

    def seconds(self, interval: Interval) -> float:
        begin, end = interval
        return float(end - begin) * 1e-9


class DeviceClock:
    """Clock of an accelerator, which computes what the host has launched before: its readings are events.

    An event between two kernels has the time at which the device came to it. So a wait for a message is the time that
    the device waited, wherever the host is.
    """

    is_late = True

    def __init__(self, record_event: Callable[[], _Reading]) -> None:
        self.now = record_event

    def seconds(self, interval: Interval) -> float:
        begin, end = interval
        end.synchronize()  # of a step that is over: the device has passed it
        return float(begin.elapsed_time(end)) * 1e-3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of the device that a rank computes on."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        return HostClock()
    return DeviceClock(partial(_record_event, device))


def _record_event(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class TimedTransport:
    """Transport that notes when its rank waited for others, and when it sent."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.ranks = transport.ranks
        self.receives_ahead = transport.receives_ahead
        self.waits: list[Interval] = []
        self.sends: list[Interval] = []
        self._now = clock.now

    def use(self, transport: Transport) -> None:
        """Go on with another transport of the same rank, before the first message."""
        self.transport = transport
        self.receives_ahead = transport.receives_ahead

    def begin(self) -> None:
        """Forget the intervals of the step before."""
        self.waits, self.sends = [], []

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        begin = self._now()
        self.transport.send(peer, tensors)
        self.sends.append((begin, self._now()))

    def receive(self, peer: int, metas: Sequence[Meta]) -> Arrival:
        return _TimedArrival(self.transport.receive(peer, metas), self._now, self.waits)

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        begin = self._now()
        shared = self.transport.share(source, numbers, count)
        self.waits.append((begin, self._now()))
        return shared

    def finish(self) -> None:
        begin = self._now()
        self.transport.finish()
        self.sends.append((begin, self._now()))

    def clear(self) -> None:
        self.transport.clear()


class _TimedArrival:
    """Parcel in transit, whose wait is noted."""

    __slots__ = ("_arrival", "_now", "_waits")

    def __init__(self, arrival: Arrival, now: Callable[[], _Reading], waits: list[Interval]) -> None:
        self._arrival = arrival
        self._now = now
        self._waits = waits

    def wait(self) -> list[Tensor]:
        begin = self._now()
        tensors = self._arrival.wait()
        self._waits.append((begin, self._now()))
        return tensors
