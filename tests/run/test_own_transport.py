"""A transport of one's own is one class, passed to a schedule as transport=."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipelineStage, Schedule1F1B
from pipecut.run.transport import Arrival, DistributedTransport, InProcessTransport, Meta, ParcelQueues, Transport
from pipecut.schedule import tie_messages
from tests.support.ranks import Ranks

MICROBATCHES = 3


class Counting:
    """Counts the parcels that a rank sends by another transport."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.ranks, self.receives_ahead = inner.rank, inner.ranks, inner.receives_ahead
        self.sent: list[int] = []  # to which ranks

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        self.sent.append(peer)
        self.inner.send(peer, tensors)

    def receive(self, peer: int, metas: Sequence[Meta]) -> Arrival:
        return self.inner.receive(peer, metas)

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        return self.inner.share(source, numbers, count)

    def finish(self) -> None:
        self.inner.finish()

    def clear(self) -> None:
        self.inner.clear()


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def test_all_parcels_of_one_process_go_through_it() -> None:
    made: dict[int, Counting] = {}
    queues = ParcelQueues()

    def counting(rank: int, ranks: int) -> Counting:
        made[rank] = Counting(InProcessTransport(queues, rank, ranks))
        return made[rank]

    parts = modules()
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(parts)]
    x, y = torch.randn(2, 6, 4)
    schedule = Schedule1F1B(stages, MICROBATCHES, F.mse_loss, transport=counting)
    output = schedule.step(x, target=y)
    assert torch.allclose(output, parts[1](parts[0](x)))
    schedule.step(x, target=y)
    # A parcel for each microbatch of two steps; the first one goes with a description.
    assert {rank: each.sent for rank, each in made.items()} == {0: [1] * (2 * MICROBATCHES + 1), 1: [0] * 6}


def count_on_ranks(rank: int) -> list[int]:
    made: list[Counting] = []

    def counting(rank: int, ranks: int) -> Counting:
        made.append(Counting(DistributedTransport(None, torch.device("cpu"))))
        return made[-1]

    stage = PipelineStage(modules()[0], rank, 2, "cpu")
    ties = [{0: "weight", 1: "weight"}]
    schedule = Schedule1F1B(stage, MICROBATCHES, F.mse_loss, transport=counting, ties=ties)
    x, y = torch.ones(2, 6, 4)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == 1 else {}))
    return made[0].sent


@pytest.mark.distributed
def test_all_parcels_between_ranks_go_through_it_and_a_tie_takes_the_messages_of_its_algorithm(
    two_ranks: Ranks,
) -> None:
    for rank, sent in enumerate(two_ranks.run(count_on_ranks)):
        of_tie = sum(message.source == rank for message in tie_messages([0, 1]))
        assert sent == [1 - rank] * (MICROBATCHES + (rank == 0) + of_tie)


def test_a_transport_of_another_rank_is_an_error() -> None:
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(modules())]
    one = InProcessTransport(ParcelQueues(), 0, 2)
    message = r"InProcessTransport is made for rank 0 of 2, and the schedule needs one for rank 1 of 2: let transport="
    with pytest.raises(InputError, match=message):
        Schedule1F1B(stages, 2, F.mse_loss, transport=lambda rank, ranks: one)


def test_what_is_not_a_transport_is_an_error_before_the_first_step() -> None:
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(modules())]
    made, half = InProcessTransport(ParcelQueues(), 0, 2), SimpleNamespace(rank=0, ranks=2, receives_ahead=True)
    with pytest.raises(
        InputError, match=r"transport= is a InProcessTransport: pass a function of \(rank, ranks\) that"
    ):
        Schedule1F1B(stages, MICROBATCHES, F.mse_loss, transport=made)
    with pytest.raises(
        InputError, match="SimpleNamespace, made by transport=, has no send, receive, share, finish, clear"
    ):
        Schedule1F1B(stages, MICROBATCHES, F.mse_loss, transport=lambda rank, ranks: half)
