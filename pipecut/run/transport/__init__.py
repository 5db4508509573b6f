"""Transports between ranks: read base.py first, which has the protocol that a transport of your own implements."""

from .base import (
    Arrival,
    Clock,
    InProcessTransport,
    Interval,
    Meta,
    ParcelQueues,
    Ready,
    TimedTransport,
    Transport,
    TransportFactory,
    Turn,
    clock_of,
)
from .distributed import DistributedTransport, connection_to, device_of_numbers, wait_for
from .host import HostChannels, HostMeeting
from .selection import Selection, TransportOption
from .shared_memory import SharedMemoryTransport

__all__ = [
    "Arrival",
    "Clock",
    "DistributedTransport",
    "HostChannels",
    "HostMeeting",
    "InProcessTransport",
    "Interval",
    "Meta",
    "ParcelQueues",
    "Ready",
    "Selection",
    "SharedMemoryTransport",
    "TimedTransport",
    "Transport",
    "TransportFactory",
    "TransportOption",
    "Turn",
    "clock_of",
    "connection_to",
    "device_of_numbers",
    "wait_for",
]
