"""Selection of a transport: the one that was asked for, or the quickest one that all ranks can use."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import InputError
from .base import InProcessTransport, ParcelQueues, Transport, TransportFactory
from .distributed import DistributedTransport
from .host import HostChannels, HostMeeting
from .shared_memory import SharedMemoryTransport

TransportOption = TransportFactory | str | None  # of a schedule

_PROCESS_GROUP, _SHARED_MEMORY = _NAMES = ("process_group", "shared_memory")
_VARIABLE = "PIPECUT_TRANSPORT"  # of the environment: the default of transport=
_REMEDY = (
    "pass a function of (rank, ranks) that returns an object with the protocol of pipecut.run.Transport, or "
    f'"{_PROCESS_GROUP}" or "{_SHARED_MEMORY}", or leave it out'
)
_PROTOCOL = ("rank", "ranks", "receives_ahead", "send", "receive", "share", "finish", "clear")
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[HostChannels]] = weakref.WeakKeyDictionary()


class Selection:
    """The transports of the ranks in this process, by the option transport= of a schedule."""

    def __init__(self, option: TransportOption) -> None:
        variable = os.environ.get(_VARIABLE) or None
        name, given = ("transport=", option) if option is not None else (f"{_VARIABLE}=", variable)
        if isinstance(given, str):
            if given not in _NAMES:
                raise InputError(f'{name}"{given}" is not known: {_REMEDY}')
        elif given is not None and not callable(given):
            raise InputError(f"transport= is a {type(given).__name__}: {_REMEDY}")
        self._asked = given

    def in_process(self, ranks: int) -> list[Transport]:
        """Return the transports of all ranks, which are in this process."""
        queues = ParcelQueues()
        make = self._asked if callable(self._asked) else lambda rank, ranks: InProcessTransport(queues, rank, ranks)
        return [_checked(make(rank, ranks), rank, ranks) for rank in range(ranks)]

    def before_meeting(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta) -> Transport:
        """Return the transport of this rank, which it keeps unless it meets all others on its host."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if callable(self._asked):
            return _checked(self._asked(rank, ranks), rank, ranks)
        return DistributedTransport(group, device, timeout)

    def meet(
        self,
        meeting: HostMeeting,
        group: dist.ProcessGroup,
        devices: Iterable[torch.device],
        timeout: timedelta,
    ) -> SharedMemoryTransport | None:
        """Return the transport of this rank if all ranks of the group are on one host, and none of them refuses.

        All schedules of a group share its channels: so it is seen if the ranks run different ones at a time.
        """
        known = _channels.get(group)
        current = None if known is None else known()
        channels = meeting.run(current, self._refusal(devices), required=self._asked == _SHARED_MEMORY)
        if channels is None:
            return None
        if channels is not current:
            _channels[group] = weakref.ref(channels)
        return SharedMemoryTransport(channels, timeout)

    def _refusal(self, devices: Iterable[torch.device]) -> str:
        if callable(self._asked):
            return "it has a transport of its own"
        if self._asked == _PROCESS_GROUP:
            return "it was asked to use the process group"
        elsewhere = sorted({str(device) for device in devices if device.type != "cpu"})
        return f"it has stages on {', '.join(elsewhere)}" if elsewhere else ""


def _checked(transport: Transport, rank: int, ranks: int) -> Transport:
    missing: Sequence[str] = [name for name in _PROTOCOL if not hasattr(transport, name)]
    if missing:
        raise InputError(f"{type(transport).__name__}, made by transport=, has no {', '.join(missing)}: {_REMEDY}")
    if (transport.rank, transport.ranks) != (rank, ranks):
        raise InputError(
            f"{type(transport).__name__} is made for rank {transport.rank} of {transport.ranks}, and the schedule "
            f"needs one for rank {rank} of {ranks}: let transport= be a function of (rank, ranks) that makes it"
        )
    return transport
