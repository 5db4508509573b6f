"""How long a message between two ranks takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from ..errors import PlanError
from .amount import amount


@dataclass(frozen=True)
class Link:
    """A connection: a message of n bytes takes latency + n / bandwidth, in the unit of the other costs.

    >>> Link(latency=0.5, bandwidth=4.0).time(10)
    3.0
    """

    latency: float
    bandwidth: float  # bytes in one unit of time

    def __post_init__(self) -> None:
        amount("latency", self.latency)
        if amount("bandwidth", self.bandwidth, signed=True) <= 0:
            raise PlanError(
                f"bandwidth={self.bandwidth}: no message would ever arrive; give the bytes that pass in one unit of "
                "time, more than 0."
            )

    def time(self, size: float) -> float:
        """How long a message of that many bytes takes."""
        return self.latency + size / self.bandwidth


Pair = tuple[int, int]
Transfer = float | Link | Mapping[Pair, float | Link]  # for all pairs of ranks, or by (source rank, target rank)
MessageBytes = float | Mapping[Pair, float]  # for all messages, or by (maker stage, user stage)


def check_transfer(transfer: object) -> None:
    """Refuse what is neither a time, nor a Link, nor one of them for each pair of ranks."""
    if not isinstance(transfer, Mapping):
        _check_one("transfer", transfer)
        return
    for pair, value in transfer.items():
        _check_pair("transfer", pair, "(source rank, target rank)")
        _check_one(f"transfer[{pair}]", value)


def check_message_bytes(message_bytes: object, transfer: object) -> None:
    """Refuse what is neither a size nor one for each pair of stages, and a Link without sizes."""
    links = list(transfer.values()) if isinstance(transfer, Mapping) else [transfer]
    with_link = any(isinstance(link, Link) for link in links)
    if message_bytes is None:
        if with_link:
            raise PlanError("transfer has a Link, whose time depends on the size of a message: give message_bytes too.")
        return
    if not isinstance(message_bytes, Mapping):
        amount("message_bytes", message_bytes)
        return
    for pair, value in message_bytes.items():
        _check_pair("message_bytes", pair, "(maker stage, user stage)")
        amount(f"message_bytes[{pair}]", value)


def message_time(transfer: Transfer, message_bytes: MessageBytes, ranks: Pair, edge: Pair) -> float:
    """How long what passes along an edge (maker stage, user stage) takes from the first rank to the second."""
    link = _of_pair(transfer, ranks)
    return link.time(_size(message_bytes, edge)) if isinstance(link, Link) else float(link)


def _of_pair(transfer: Transfer, ranks: Pair) -> float | Link:
    if not isinstance(transfer, Mapping):
        return transfer
    if ranks not in transfer:
        raise PlanError(
            f"transfer has no value for messages from rank {ranks[0]} to rank {ranks[1]}: add transfer[{ranks}]."
        )
    return transfer[ranks]


def _size(message_bytes: MessageBytes, edge: Pair) -> float:
    if not isinstance(message_bytes, Mapping):
        return message_bytes
    if edge not in message_bytes:
        raise PlanError(
            f"message_bytes has no value for what passes between stage {edge[0]}, its maker, and stage {edge[1]}, its "
            f"user: add message_bytes[{edge}]."
        )
    return message_bytes[edge]


def _check_one(what: str, value: object) -> None:
    if not isinstance(value, Link | Real):
        raise PlanError(
            f"{what}={value!r}: give the time that a message takes, a Link(latency, bandwidth), or a dict from "
            "(source rank, target rank) to these."
        )
    if not isinstance(value, Link):
        amount(what, value)


def _check_pair(what: str, pair: object, names: str) -> None:
    numbers = pair if isinstance(pair, tuple) else ()
    if len(numbers) != 2 or not all(isinstance(number, int) for number in numbers):
        raise PlanError(f"{what} has the key {pair!r}: its keys are pairs {names}, such as (0, 1).")
