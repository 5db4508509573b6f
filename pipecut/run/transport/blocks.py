"""Blocks of memory that one process lends to another on its host, and uses again when it has them back.

A block is a file in memory without a name (memfd), which both processes map. So nothing is left of it when they end,
in whatever way they end.
"""

from __future__ import annotations

import os
from collections import deque
from typing import NamedTuple

import torch

# Bytes that may be on their way to one receiver before the sender waits; one parcel may be larger.
_LIMIT = 32 * 1024 * 1024
_AT_LEAST = 64 * 1024
# A receiver keeps quiet about one block, unless it has something to send: of more its sender is told, so that a rank
# which sends many in a row makes few. A block is also told of from this size on, which is less than the limit: a sender
# that waits is always told.
_QUIET_BYTES = _LIMIT // 4
_QUIET_BLOCKS = 1


class _Block:
    """Memory that two processes share."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number = number
        self.size = size
        # Not the module mmap, which keeps a descriptor open for each.
        path = f"/proc/self/fd/{descriptor}"
        self._memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")
        self.address = self._memory.data_ptr()


class _Loan(NamedTuple):
    """A block to fill. One that is new to the receiver has a descriptor, which the sender closes once it is sent."""

    number: int
    address: int
    descriptor: int | None = None
    given_up: tuple[int, ...] = ()  # blocks that the receiver will not see again


class LentBlocks:
    """The blocks of a sender for one receiver, which returns them in the order in which it got them."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._lent: deque[_Block] = deque()
        self._returned = 0
        self._made = 0
        self._bytes = 0

    @property
    def are_too_many(self) -> bool:
        """True if the sender should wait for some to come back."""
        return self._bytes > _LIMIT // 2

    def has(self, size: int) -> bool:
        """Return True if a block of at least this size is free."""
        return any(block.size >= size for block in self._free)

    def take_back(self, count: int) -> None:
        """Note how many the receiver has returned by now, in all."""
        while self._returned < count:
            block = self._lent.popleft()
            self._bytes -= block.size
            self._returned += 1
            self._free.append(block)

    def lend(self, size: int) -> _Loan:
        """Return a block of at least this size."""
        fitting = [block for block in self._free if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self._free.remove(block)
            loan = _Loan(block.number, block.address)
        else:
            # No more blocks than were on their way at a time: those that are too small make room for this one.
            given_up = tuple(block.number for block in self._free)
            self._free.clear()
            size = max(_AT_LEAST, 1 << (size - 1).bit_length())  # memory that is never written to takes no place
            descriptor = _new_memory(size)
            block = _Block(self._made, descriptor, size)
            self._made += 1
            loan = _Loan(block.number, block.address, descriptor, given_up)
        self._lent.append(block)
        self._bytes += block.size
        return loan


class BorrowedBlocks:
    """The blocks of a sender, as its receiver has mapped them."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self.returned = 0  # of all that came
        self._told = 0  # of these
        self._bytes = 0  # of those that the sender was not told of

    @property
    def has_news(self) -> bool:
        """True if the sender should hear soon what has been returned."""
        return self.returned - self._told > _QUIET_BLOCKS or self._bytes >= _QUIET_BYTES

    def add(self, number: int, descriptor: int) -> None:
        """Map a block that is new."""
        try:
            self._blocks[number] = _Block(number, descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def drop(self, number: int) -> None:
        """Unmap a block that the sender has given up."""
        del self._blocks[number]

    def address(self, number: int) -> int:
        """Return where a block begins."""
        return self._blocks[number].address

    def give_back(self, number: int) -> None:
        """Note that a block has been read, and may be used again."""
        self.returned += 1
        self._bytes += self._blocks[number].size

    def told(self) -> None:
        """Note that the sender is told of all that has been returned."""
        self._told, self._bytes = self.returned, 0


def check_shared_memory() -> None:
    """Raise an OSError or a RuntimeError if the system does not have what blocks are made of."""
    descriptor = _new_memory(_AT_LEAST)
    try:
        _Block(0, descriptor, _AT_LEAST)
    finally:
        os.close(descriptor)


def _new_memory(size: int) -> int:
    """Make a file in memory, and return its descriptor."""
    descriptor = os.memfd_create("pipecut", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
