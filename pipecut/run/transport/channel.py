"""Messages between two processes of one host: over a Unix socket, and in shared memory if they are large.

A message wakes its receiver once: what is small goes through the socket, and of what is large only the announcement.
Nothing runs in the background. A process that has to wait, for a message or for room, reads meanwhile what others have
sent, so that processes never wait for each other in a circle.
"""

from __future__ import annotations

import array
import ctypes
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ...errors import LostConnectionError, PipeError
from .blocks import BorrowedBlocks, LentBlocks

PARCEL, NUMBERS, _NEWS = range(3)  # contents of a message; _NEWS is nothing but the blocks that are returned
_NAMES = {PARCEL: "a parcel", NUMBERS: "numbers"}
_HEADER = struct.Struct("<5q")  # content, blocks returned so far, number of a block, bytes, blocks that are given up
_INLINE = -1  # as the number of a block: the message is in the socket
_MOST_INLINE = 4096  # bytes; some twenty such messages fit into a socket before their sender has to wait
_ALIGNMENT = 64  # of the pieces of a message
_SLICE = 0.02  # seconds of waiting for one process, until the others are read too
_DESCRIPTORS = socket.CMSG_SPACE(4)
# Numbers: to combine members of an enum takes longer than to send a message.
_WITHOUT_WAITING = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_READ, _READ_NOW = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_GONE = "Connection closed by the other process"

_Piece = tuple[int, int]  # an address, and the number of bytes there


class _Expected(Protocol):
    """A message that this process is going to wait for."""

    content: int
    size: int  # by `size_of`
    is_here: bool

    def take(self, address: int) -> None:
        """Copy the message from where it lies, and be here."""


def aligned(size: int) -> int:
    """Return where the next piece of a message begins after one of this size."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Early:
    """A message that came before it was expected."""

    def __init__(self, content: int, address: int, size: int) -> None:
        self.content, self.size = content, size
        self.data = bytearray(ctypes.string_at(address, size) or b"\0")  # memory of no bytes has no address


class Channel:
    """Messages to and from one other rank, in their order."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank = rank
        self.socket = connected
        self.has_ended = False  # the other process has closed it, or has ended
        self.others: Sequence[Channel] = ()  # of this process, to be read while it waits at this one
        self._expected: deque[_Expected] = deque()
        self._early: deque[_Early] = deque()
        self._lent, self._borrowed = LentBlocks(), BorrowedBlocks()
        self._in, self._out = bytearray(_HEADER.size + _MOST_INLINE), bytearray(_HEADER.size + _MOST_INLINE)
        self._in_address, self._out_address = (_address_of(each) + _HEADER.size for each in (self._in, self._out))
        self._in_views, self._out_view = [memoryview(self._in)], memoryview(self._out)
        connected.setblocking(True)
        # Not settimeout(), which would call poll() before each message.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_SLICE * 1e6)))

    # Sending.

    def send(self, content: int, pieces: Sequence[_Piece], timeout: float) -> None:
        """Send a message that is made of pieces of memory, which may change afterwards."""
        size = sum([aligned(each) for _, each in pieces])
        if size > _MOST_INLINE:
            self._send_in_block(content, pieces, size, timeout)
            return
        _copy(pieces, self._out_address)
        _HEADER.pack_into(self._out, 0, content, self._borrowed.returned, _INLINE, size, 0)
        self._post(_HEADER.size + size, timeout)

    def _send_in_block(self, content: int, pieces: Sequence[_Piece], size: int, timeout: float) -> None:
        if not self._lent.has(size):
            _read_all([self])  # some may have come back
        if self._lent.are_too_many:
            self._wait(lambda: not self._lent.are_too_many, timeout)
        loan = self._lent.lend(size)
        try:
            _copy(pieces, loan.address)
            given_up = loan.given_up
            _HEADER.pack_into(self._out, 0, content, self._borrowed.returned, loan.number, size, len(given_up))
            struct.pack_into(f"<{len(given_up)}q", self._out, _HEADER.size, *given_up)
            self._post(_HEADER.size + 8 * len(given_up), timeout, loan.descriptor)
        finally:
            if loan.descriptor is not None:
                os.close(loan.descriptor)

    def _post(self, length: int, timeout: float, descriptor: int | None = None) -> None:
        """Send what is written in `_out`; wait only if the socket is full."""
        if not self._try_to_post(length, descriptor):
            message = bytes(self._out_view[:length])  # what is read meanwhile may be answered

            def is_sent() -> bool:
                self._out[:length] = message
                return self._try_to_post(length, descriptor)

            self._wait(is_sent, timeout, select.POLLIN | select.POLLOUT)
        self._borrowed.told()

    def _try_to_post(self, length: int, descriptor: int | None) -> bool:
        try:
            if descriptor is None:
                self.socket.send(self._out_view[:length], _WITHOUT_WAITING)
            else:
                fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
                self.socket.sendmsg([self._out_view[:length]], fds, _WITHOUT_WAITING)
        except BlockingIOError:
            return False
        except OSError as error:
            raise LostConnectionError(self.rank, error) from error
        return True

    # Receiving.

    def expect(self, message: _Expected) -> None:
        """Expect a message after all that were expected before."""
        if not self._early:
            self._expected.append(message)
            return
        early = self._early.popleft()
        self._check(message, early.content, early.size)
        message.take(_address_of(early.data))

    def wait_for(self, message: _Expected, timeout: float) -> None:
        """Wait until a message is here that was expected."""
        while not message.is_here:
            if not self.read():
                self._wait(lambda: message.is_here, timeout)

    def read(self, flags: int = _READ) -> bool:
        """Read the next message, and return False if none has come for a moment."""
        if self.has_ended:
            raise LostConnectionError(self.rank, ConnectionResetError(_GONE))
        try:
            length, ancillary, _, _ = self.socket.recvmsg_into(self._in_views, _DESCRIPTORS, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # by a process that did not read everything; its messages come first
            return True
        except OSError as error:
            raise LostConnectionError(self.rank, error) from error
        if length == 0:
            self.has_ended = True
            raise LostConnectionError(self.rank, ConnectionResetError(_GONE))
        content, returned, block, size, given_up = _HEADER.unpack_from(self._in)
        self._lent.take_back(returned)
        if block == _INLINE:
            if content != _NEWS:
                self._give(content, self._in_address, size)
            return True
        for number in struct.unpack_from(f"<{given_up}q", self._in, _HEADER.size):
            self._borrowed.drop(number)
        if ancillary:
            self._borrowed.add(block, struct.unpack("i", ancillary[0][2][:4])[0])
        self._give(content, self._borrowed.address(block), size)
        self._borrowed.give_back(block)
        if self._borrowed.has_news:
            self._send_news()
        return True

    def _give(self, content: int, address: int, size: int) -> None:
        """Copy a message to where it is expected."""
        if not self._expected:
            self._early.append(_Early(content, address, size))
            return
        message = self._expected.popleft()
        self._check(message, content, size)
        message.take(address)

    def _check(self, message: _Expected, content: int, size: int) -> None:
        if (message.content, message.size) != (content, size):
            raise PipeError(
                f"expected {_NAMES[message.content]} of {message.size} bytes from rank {self.rank}, and got "
                f"{_NAMES[content]} of {size} bytes: do all ranks make the same calls, with the same modules?"
            )

    def _send_news(self) -> None:
        """Tell the sender which blocks are returned; it will learn that later if the socket is full or gone."""
        header = _HEADER.pack(_NEWS, self._borrowed.returned, _INLINE, 0, 0)
        try:
            self.socket.send(header, _WITHOUT_WAITING)
        except OSError:
            return
        self._borrowed.told()

    # Waiting.

    def _wait(self, is_done: Callable[[], bool], timeout: float, events: int = select.POLLIN) -> None:
        """Wait until something is done, and read what all others send meanwhile."""
        begin = time.monotonic()
        poll = select.poll()
        poll.register(self.socket, events)
        while not is_done():
            if time.monotonic() - begin > timeout:
                raise LostConnectionError(self.rank, TimeoutError(f"timed out after {timeout:g} s"))
            for _, happened in poll.poll(1000 * _SLICE):
                if happened & ~select.POLLOUT:
                    self.read(_READ_NOW)
            _read_all(self.others)
            for channel in (self, *self.others):  # what a full socket kept back; its reader may be waiting for it
                if channel._borrowed.has_news and not channel.has_ended:
                    channel._send_news()

    def shut_down(self) -> None:
        """Wake whoever waits at either end, from any thread."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was quicker


def _read_all(channels: Iterable[Channel]) -> None:
    """Read all that has come; a process that has ended is an error for those that wait for it only."""
    for channel in channels:
        try:
            while not channel.has_ended and channel.read(_READ_NOW):
                continue
        except LostConnectionError:
            channel.has_ended = True


def _copy(pieces: Sequence[_Piece], to: int) -> None:
    for address, size in pieces:
        if size and not address:
            raise PipeError("a tensor without memory cannot be sent")
        ctypes.memmove(to, address, size)
        to += aligned(size)


def _address_of(memory: bytearray) -> int:
    """Return where memory begins, which must be kept."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
