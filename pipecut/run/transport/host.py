"""Channels between all ranks of a group that are on one host, made if every rank can reach every other.

Each rank listens at a Unix socket in the abstract namespace, under a random name: there is no file, and nothing is left
when a process ends, in whatever way. The ranks tell each other these names through the store of their process group,
connect, and tell each other whether that worked. If it did not everywhere, no rank uses the channels.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import DisagreementError, PipeError
from .blocks import check_shared_memory
from .channel import Channel

_TOKEN = 32  # characters by which ranks know each other
_HELLO = struct.Struct(f"<q{_TOKEN}s")
_USER = struct.Struct("3i")  # process, user, group

_Facts = Mapping[str, str]
_TellAll = Callable[
    [_Facts, str], Sequence[_Facts]
]  # gives facts to all ranks, under a title, and returns those of all


class HostChannels:
    """Channels of one rank to all others of its group."""

    def __init__(self, name: str, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self.name = name  # the same on all ranks
        self.rank = rank
        self.ranks = len(sockets) + 1
        self.is_open = True
        self.of = {other: Channel(other, each) for other, each in sorted(sockets.items())}
        for channel in self.of.values():
            channel.others = [each for each in self.of.values() if each is not channel]
        weakref.finalize(self, _release, list(self.of.values()))
        _alive.add(self)

    def shut_down(self) -> None:
        """Wake whoever waits on any rank, from any thread; the channels cannot be used any more."""
        self.is_open = False
        for channel in self.of.values():
            channel.shut_down()

    def leave(self) -> None:
        """Close what a child process has inherited: others would take it for this rank, and not see the rank end."""
        _close_all([channel.socket for channel in self.of.values()])


_alive: weakref.WeakSet[HostChannels] = weakref.WeakSet()


def _leave_all() -> None:
    for channels in list(_alive):
        channels.leave()


os.register_at_fork(after_in_child=_leave_all)


def _release(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.others = ()  # a circle, which would keep their memory
        channel.socket.close()


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


class HostMeeting:
    """The attempt of the ranks of one group to reach each other on one host."""

    def __init__(self, rank: int, ranks: int, tell_all: _TellAll, seconds: float) -> None:
        self._rank, self._ranks = rank, ranks
        self._tell_all = tell_all
        self._seconds = seconds
        self._listener: _Listener | None = None

    def run(self, current: HostChannels | None, refusal: str, *, required: bool) -> HostChannels | None:
        """Return channels to all ranks, those that there are if all still have them; None if there is no way.

        A rank with a `refusal` says why it takes no part. If the channels are `required` on any rank, that is an error
        on all.
        """
        if not refusal and self._listener is None:
            self._listener, refusal = _try_to(_Listener, self._ranks)
        own = {
            "channels": current.name if current is not None and current.is_open else "",
            "address": "" if self._listener is None else self._listener.address,
            "refusal": refusal,
            "required": "yes" if required else "",
        }
        every = self._tell_all(own, "addresses")
        if any(facts["refusal"] for facts in every):
            self._check_not_required(every, every)
            return None
        names = {facts["channels"] for facts in every}
        if names != {""} and len(names) == 1:
            return current
        return self._connect(every)

    def _connect(self, every: Sequence[_Facts]) -> HostChannels | None:
        addresses = [facts["address"] for facts in every]
        reached, refusal = _try_to(_reach_all, self._rank, addresses)
        answers = self._tell_all({"refusal": refusal}, "connections")
        if any(facts["refusal"] for facts in answers):
            _close_all(list((reached or {}).values()))
            self._check_not_required(every, answers)
            return None
        assert self._listener is not None  # no refusal
        later = self._listener.accept(range(self._rank + 1, self._ranks), self._seconds)
        self._listener = None
        return HostChannels(addresses[0], self._rank, {**reached, **later})

    def _check_not_required(self, every: Sequence[_Facts], answers: Sequence[_Facts]) -> None:
        wanted = [rank for rank, facts in enumerate(every) if facts["required"]]
        if wanted:
            why = [f"  rank {rank}: {facts['refusal']}\n" for rank, facts in enumerate(answers) if facts["refusal"]]
            raise DisagreementError(
                f'transport="shared_memory" was asked for on rank {wanted[0]}, and is not possible:\n{"".join(why)}'
                "Leave out transport= to use the process group where that is so."
            )


def _try_to(do: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Return what a function returns, or why the system does not let it."""
    try:
        return do(*args), ""
    except (OSError, RuntimeError, AttributeError) as error:  # some systems do not have the names
        return None, f"{type(error).__name__}: {error}"


class _Listener:
    """A socket at which other ranks connect."""

    def __init__(self, ranks: int) -> None:
        check_shared_memory()
        self._token = secrets.token_hex(_TOKEN // 2)
        self._name = f"pipecut-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._socket.close)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(2 * ranks)

    @property
    def address(self) -> str:
        """The name of the socket, and what to say there."""
        return f"{self._name} {self._token}"

    def accept(self, ranks: Sequence[int], seconds: float) -> dict[int, socket.socket]:
        """Return a connection for each of these ranks, all of which have connected."""
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + seconds
        while len(found) < len(ranks):
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                connected, _ = self._socket.accept()
                rank = self._rank_of(connected, max(0.001, end - time.monotonic()))
            except OSError as error:
                _close_all(list(found.values()))
                missing = sorted(set(ranks) - set(found))
                raise PipeError(f"ranks {missing} have connected on this host, and are gone: {error}") from error
            if rank in ranks and rank not in found:
                found[rank] = connected
            else:
                connected.close()  # a stranger
        return found

    def _rank_of(self, connected: socket.socket, seconds: float) -> int:
        """Return the rank at the other end; -1 for a process that is none of ours."""
        connected.settimeout(seconds)
        hello = connected.recv(_HELLO.size) if _is_same_user(connected) else b""
        if len(hello) < _HELLO.size:
            return -1
        rank, token = _HELLO.unpack(hello)
        return int(rank) if secrets.compare_digest(token, self._token.encode()) else -1


def _reach_all(rank: int, addresses: Sequence[str]) -> dict[int, socket.socket]:
    """Connect to all ranks before this one: that takes no answer of theirs."""
    reached: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo:
        for other, address in enumerate(addresses[:rank]):
            name, token = address.split()
            connected = reached[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(connected.close)
            connected.setblocking(False)  # an error rather than a wait if there is no place left
            connected.connect(f"\0{name}")
            if not _is_same_user(connected):
                raise PermissionError(f"rank {other} belongs to another user")
            connected.send(_HELLO.pack(rank, token.encode()))
        undo.pop_all()
    return reached


def _is_same_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size)
    return bool(_USER.unpack(credentials)[1] == os.getuid())
