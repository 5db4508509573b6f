"""Messages between processes of one host: what arrives, what waits, what ends, and that nothing is left."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecut.errors import DisagreementError, LostConnectionError, PipeError
from pipecut.run.transport import HostChannels, HostMeeting, Meta, SharedMemoryTransport
from pipecut.run.transport.host import _Listener
from tests.support.limits import WORK

LONG = timedelta(seconds=WORK)
MEGABYTE = 1 << 20


def pair(timeout: timedelta = LONG) -> list[SharedMemoryTransport]:
    """Two ranks, both in this process."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    every = HostChannels("test", 0, {1: one}), HostChannels("test", 1, {0: other})
    return [SharedMemoryTransport(channels, timeout) for channels in every]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at the same time; one that hangs is left alone, and the test fails."""
    pool = ThreadPoolExecutor(len(calls))
    try:
        return [future.result(timeout=WORK) for future in [pool.submit(call) for call in calls]]
    finally:
        pool.shutdown(wait=False)


def metas_of(tensors: list[Tensor]) -> list[Meta]:
    return [Meta.of(tensor) for tensor in tensors]


def values_of(numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float32)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_blocks() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:pipecut" in line for line in maps)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8,
    torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip


def test_tensors_of_all_kinds_arrive_as_they_were() -> None:
    one, other = pair()
    sent = [torch.randn(3, 5).to(dtype) for dtype in DTYPES]
    sent += [torch.tensor(7.0), torch.empty(0), torch.empty(2, 0, 3), torch.randn(4, 6).t(), torch.ones(1).expand(9)]
    sent += [torch.randn(2, requires_grad=True), values_of(MEGABYTE)]
    for parcel in (sent, sent[:-1], [torch.empty(0)], sent[:3]):
        one.send(1, parcel)
        got = other.receive(0, metas_of(parcel)).wait()
        for a, b in zip(parcel, got, strict=True):
            assert (a.dtype, a.shape, b.is_contiguous(), b.requires_grad) == (b.dtype, b.shape, True, False)
            assert torch.equal(a.detach().contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def test_what_is_sent_may_change_afterwards_and_what_arrives_belongs_to_the_receiver() -> None:
    one, other = pair()
    for size in (4, MEGABYTE):
        first, second = torch.zeros(size), torch.ones(size)
        arrivals = [other.receive(0, metas_of([first])) for _ in range(2)]
        one.send(1, [first])
        first.fill_(5)
        one.send(1, [second])
        assert arrivals[1].wait()[0].sum() == size
        (got,) = arrivals[0].wait()
        assert got.sum() == 0
        one.send(1, [second])
        other.receive(0, metas_of([second])).wait()[0].fill_(3)
        assert got.sum() == 0
        assert arrivals[0].wait()[0] is got


def test_parcels_larger_than_all_that_may_be_on_the_way() -> None:
    one, other = pair()
    large = values_of(12 * MEGABYTE)  # 48 MB

    def receive() -> None:
        for _ in range(3):
            assert torch.equal(other.receive(0, metas_of([large])).wait()[0], large)

    together(receive, lambda: [one.send(1, [large]) for _ in range(3)])
    assert shared_blocks() == 2  # one block, mapped on both sides: a second one waits until it is back


@pytest.mark.parametrize("numel", [8, 1000, MEGABYTE // 2])
def test_two_ranks_that_first_send_everything_do_not_block_each_other(numel: int) -> None:
    every = pair()
    count = 400 if numel < 5000 else 60

    def run(rank: int) -> None:
        for nth in range(count):
            every[rank].send(1 - rank, [torch.full((numel,), float(nth))])
        for nth in range(count):
            (got,) = every[rank].receive(1 - rank, [Meta((numel,), torch.float32, False)]).wait()
            assert got[0] == got[-1] == nth

    together(lambda: run(0), lambda: run(1))


def test_a_ring_of_ranks_that_first_send_everything() -> None:
    """Each waits for room on its way to the next, while the one before waits for it."""
    sockets: list[dict[int, socket.socket]] = [{}, {}, {}]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        sockets[a][b], sockets[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    every = [SharedMemoryTransport(HostChannels("ring", rank, each), LONG) for rank, each in enumerate(sockets)]

    def run(rank: int) -> None:
        for _ in range(40):
            every[rank].send((rank + 1) % 3, [torch.full((MEGABYTE // 4,), float(rank))])
            every[rank].send((rank + 1) % 3, [torch.full((900,), float(rank))])
        for _ in range(40):
            for numel in (MEGABYTE // 4, 900):
                (got,) = every[rank].receive((rank - 1) % 3, [Meta((numel,), torch.float32, False)]).wait()
                assert got[0] == got[-1] == (rank - 1) % 3

    together(*(lambda rank=rank: run(rank) for rank in range(3)))


def test_blocks_are_used_again() -> None:
    one, other = pair()
    for _ in range(50):
        parcel = [torch.zeros(MEGABYTE // 4), torch.zeros(7)]
        one.send(1, parcel)
        other.receive(0, metas_of(parcel)).wait()
        other.send(0, [torch.zeros(1)])  # which tells that the block is back
        one.receive(1, [Meta((1,), torch.float32, False)]).wait()
    assert shared_blocks() == 2
    for numel in (MEGABYTE, 2 * MEGABYTE, 4 * MEGABYTE):  # a larger one takes the place of one that is too small
        one.send(1, [torch.zeros(numel)])
        other.receive(0, [Meta((numel,), torch.float32, False)]).wait()
        other.send(0, [torch.zeros(1)])
        one.receive(1, [Meta((1,), torch.float32, False)]).wait()
    assert shared_blocks() == 2


def test_a_receiver_that_sends_nothing_returns_blocks_all_the_same() -> None:
    one, other = pair()
    for _ in range(200):
        one.send(1, [torch.zeros(MEGABYTE // 4)])
        other.receive(0, [Meta((MEGABYTE // 4,), torch.float32, False)]).wait()
    assert shared_blocks() <= 2 * 2  # at either end one that is not told of, and one on its way


def test_nothing_is_left_of_channels_that_nobody_uses() -> None:
    def use() -> None:
        every = Board(3).meet(("", "", ""))
        transports = [SharedMemoryTransport(channels, LONG) for channels in every if channels is not None]
        large = torch.zeros(MEGABYTE)
        transports[0].send(2, [large])
        transports[2].receive(0, metas_of([large])).wait()
        transports[1].send(2, [large])  # which is never read
        assert shared_blocks() == 3

    use()
    before = open_files()
    for _ in range(5):
        use()
    assert (open_files(), shared_blocks()) == (before, 0)


def send_until_full(transport: SharedMemoryTransport, tensor: Tensor) -> None:
    for _ in range(10_000):
        transport.send(1, [tensor])


def test_a_sender_whose_parcels_nobody_takes_times_out() -> None:
    for numel in (1, MEGABYTE):
        one, _other = pair(timedelta(seconds=0.1))
        with pytest.raises(LostConnectionError, match="no connection to rank 1: timed out after 0.1 s") as caught:
            send_until_full(one, torch.zeros(numel))
        assert caught.value.waited


def test_a_wait_for_a_rank_that_sends_nothing_times_out() -> None:
    one, _other = pair(timedelta(seconds=0.1))
    with pytest.raises(LostConnectionError, match="no connection to rank 1: timed out after 0.1 s"):
        one.receive(1, [Meta((1,), torch.float32, False)]).wait()
    with pytest.raises(LostConnectionError, match="no connection to rank -1: .*timed out"):
        _other.add_up([1.0])  # the first rank may itself wait for another


@pytest.mark.parametrize("unread", [False, True])
def test_a_rank_that_ends_is_noticed_once_its_messages_are_read(unread: bool) -> None:
    one, other = pair()
    if unread:
        one.send(1, [torch.zeros(1)])  # the system then says that the connection was reset
    other.send(0, [torch.ones(2)])
    other.send(0, [torch.ones(MEGABYTE)])
    del other
    meta = Meta((2,), torch.float32, False)
    assert one.receive(1, [meta]).wait()[0].sum() == 2
    assert one.receive(1, [Meta((MEGABYTE,), torch.float32, False)]).wait()[0].sum() == MEGABYTE
    for _ in range(2):
        with pytest.raises(LostConnectionError, match="Connection closed by the other process") as caught:
            one.receive(1, [meta]).wait()
        assert (caught.value.peer, caught.value.waited) == (1, False)
    with pytest.raises(LostConnectionError, match="no connection to rank 1"):
        one.send(1, [torch.zeros(1)])


def test_a_rank_that_waits_is_woken_at_either_end() -> None:
    for end in range(2):
        every = pair()

        def wait(own: SharedMemoryTransport = every[0]) -> None:
            with pytest.raises(LostConnectionError, match="Connection closed"):
                own.receive(1, [Meta((1,), torch.float32, False)]).wait()

        timer = threading.Timer(0.1, every[end].channels.shut_down)
        timer.start()
        together(wait)
        timer.join()


def test_numbers_are_shared_and_added_up() -> None:
    one, other = pair()
    numbers = [2**62, -1, *range(900)]  # more than fit into the socket's message
    for some in (numbers, numbers[:256]):
        size = len(some)
        got = together(lambda some=some: one.share(0, some, 0), lambda size=size: other.share(0, None, size))
        assert got == [some, some]
    assert together(lambda: one.add_up([0.0, 1.5]), lambda: other.add_up([1.0, 2.0])) == [[1.0, 3.5]] * 2


def test_a_message_that_is_not_the_expected_one_is_an_error() -> None:
    one, other = pair()
    one.send(1, [torch.zeros(100)])
    with pytest.raises(PipeError, match="expected a parcel of 64 bytes from rank 0, and got a parcel of 448 bytes"):
        other.receive(0, [Meta((3,), torch.float32, False)]).wait()
    one.share(0, [1] * 8, 8)
    with pytest.raises(PipeError, match="expected a parcel of 64 bytes from rank 0, and got numbers of 64 bytes"):
        other.receive(0, [Meta((3,), torch.float32, False)]).wait()


def test_a_tensor_of_another_device_is_an_error() -> None:
    one, _other = pair()
    with pytest.raises(PipeError, match="a stage on the CPU made a Tensor on meta, which is to be sent"):
        one.send(1, [torch.zeros(2, device="meta")])


def test_a_child_process_does_not_keep_the_connection_open() -> None:
    """A worker of a data loader would: nobody would notice that its rank was killed."""
    one, other = pair()
    child = os.fork()
    if child == 0:
        try:
            threading.Event().wait(WORK)
        finally:
            os._exit(0)
    try:
        del other
        with pytest.raises(LostConnectionError, match="Connection closed"):
            one.receive(1, [Meta((1,), torch.float32, False)]).wait()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


# How ranks meet.


class Board:
    """Lets threads, as ranks, tell each other facts."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.facts: dict[tuple[str, int], Mapping[str, str]] = {}
        self.barrier = threading.Barrier(ranks)

    def tell(self, rank: int) -> Callable[[Mapping[str, str], str], list[Mapping[str, str]]]:
        def tell_all(facts: Mapping[str, str], title: str) -> list[Mapping[str, str]]:
            self.facts[title, rank] = facts
            self.barrier.wait(WORK)
            return [self.facts[title, each] for each in range(self.ranks)]

        return tell_all

    def meet(
        self, refusals: tuple[str, ...], current: tuple[HostChannels | None, ...] = (), required: int = -1
    ) -> list[HostChannels | None]:
        meetings = [HostMeeting(rank, self.ranks, self.tell(rank), WORK) for rank in range(self.ranks)]
        current = current or (None,) * self.ranks

        def run(rank: int) -> HostChannels | None:
            return meetings[rank].run(current[rank], refusals[rank], required=rank == required)

        return together(*(lambda rank=rank: run(rank) for rank in range(self.ranks)))


def test_ranks_meet_and_keep_the_channels_that_all_have() -> None:
    met = Board(3).meet(("", "", ""))
    transports = [SharedMemoryTransport(channels, LONG) for channels in met if channels is not None]
    sums = together(*(lambda each=each: each.add_up([each.rank + 1.0]) for each in transports))
    assert sums == [[6.0]] * 3
    assert Board(3).meet(("", "", ""), tuple(met)) == met
    again = Board(3).meet(("", "", ""), (met[0], None, met[2]))
    assert not any(channels is old for channels, old in zip(again, met, strict=True))
    met[1].shut_down()  # type: ignore[union-attr]
    assert all(channels not in met for channels in Board(3).meet(("", "", ""), tuple(met)))


def test_no_rank_has_channels_if_one_refuses() -> None:
    assert Board(2).meet(("", "it has stages on cuda:0")) == [None, None]


def test_no_rank_has_channels_if_one_cannot_reach_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another network namespace, where the name means nothing."""
    monkeypatch.setattr(_Listener, "address", "pipecut-nowhere 00000000000000000000000000000000")
    assert Board(3).meet(("", "", "")) == [None] * 3


def test_no_rank_waits_at_a_listener_that_has_no_place_left(monkeypatch: pytest.MonkeyPatch) -> None:
    full = _Listener(0)
    name = f"\0{full.address.split()[0]}"
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1)]
    for each in strangers:
        each.connect(name)
    monkeypatch.setattr(_Listener, "address", full.address)
    assert Board(2).meet(("", "")) == [None, None]
    for each in strangers:
        each.close()


def test_no_rank_has_channels_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert Board(2).meet(("", "")) == [None, None]


def test_channels_that_were_asked_for_and_are_not_possible_are_an_error_on_every_rank() -> None:
    told = []

    def run(board: Board, rank: int) -> None:
        meeting = HostMeeting(rank, 2, board.tell(rank), WORK)
        with pytest.raises(DisagreementError) as caught:
            meeting.run(None, "it has stages on cuda:0" if rank else "", required=rank == 0)
        told.append(str(caught.value))

    board = Board(2)
    together(lambda: run(board, 0), lambda: run(board, 1))
    assert told[0] == told[1]
    assert 'transport="shared_memory" was asked for on rank 0, and is not possible:\n  rank 1: it has' in told[0]


def test_a_stranger_is_turned_away() -> None:
    listener = _Listener(4)
    name, token = listener.address.split()
    strangers = [b"", b"hello", (1).to_bytes(8, "little") + b"0" * 32, (7).to_bytes(8, "little") + token.encode()]
    made = []
    for hello in [*strangers, (1).to_bytes(8, "little") + token.encode()]:
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        made[-1].connect(f"\0{name}")
        if hello:
            made[-1].send(hello)
        else:
            made.pop().close()
    found = listener.accept([1], WORK)
    assert list(found) == [1]
    found[1].send(b"welcome")
    assert made[-1].recv(10) == b"welcome"
    assert made[0].recv(10) == b""
    with pytest.raises(PipeError, match=r"ranks \[3\] have connected on this host, and are gone: timed out"):
        listener.accept([3], 0.05)
    for each in (*made, *found.values()):
        each.close()
