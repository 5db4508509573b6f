"""The clock of a step, and a transport that notes how long its rank waits and sends.

A transport of any kind is timed in one place, so that no wait for another rank is forgotten. Two readings of the clock
for each message are all that it costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .base import Arrival, Meta, Transport

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
