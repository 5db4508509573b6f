"""The messages by which ranks sum the gradient of a parameter that several of them hold.

The first rank adds up, in the order of the ranks, and sends the sum back. So all holders have the same bits, and their
parameters stay the same through any number of optimizer steps. With three ranks:

    rank 1 --status, gradient--> rank 0
    rank 2 --status, gradient--> rank 0
    rank 0 --status, sum-------> rank 1
    rank 0 --status, sum-------> rank 2

Each direction takes two messages: a status word, then the gradient. A rank that has frozen the parameter, or has no
gradient, says so in its status, and nobody waits for its gradient.

This file is the only one that knows the algorithm: pipecut.run carries out these messages, and the cost model prices
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class TieMessage(NamedTuple):
    """One message between two ranks that hold a tied parameter."""

    source: int
    target: int
    has_gradient: bool = False  # False: the status of all ranks that the source knows of
    is_added: bool = False  # True: the target adds the gradient to its own. False: it replaces it


def tie_messages(ranks: Sequence[int]) -> Iterator[TieMessage]:
    """Yield the messages of one sum between ranks, in an order in which they can be sent one after the other.

    >>> [(message.source, message.target) for message in tie_messages([0, 3]) if message.has_gradient]
    [(3, 0), (0, 3)]
    """
    first, *others = ranks
    for other in others:
        yield TieMessage(other, first)
        yield TieMessage(other, first, has_gradient=True, is_added=True)
    for other in others:
        yield TieMessage(first, other)
        yield TieMessage(first, other, has_gradient=True)
