"""Transports between ranks: read base.py first, which has the protocol that a transport of your own implements."""

from .base import Arrival, Meta, Ready, Transport, TransportFactory
from .distributed import DistributedTransport, connection_to, device_of_numbers, wait_for
from .in_process import InProcessTransport, ParcelQueues

__all__ = [
    "Arrival",
    "DistributedTransport",
    "InProcessTransport",
    "Meta",
    "ParcelQueues",
    "Ready",
    "Transport",
    "TransportFactory",
    "connection_to",
    "device_of_numbers",
    "wait_for",
]
