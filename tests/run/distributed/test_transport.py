"""What goes between ranks: values of all kinds, groups of some of the ranks, and no memory that grows."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipelineStage, Schedule1F1B
from pipecut.run.transport import selection
from pipecut.run.transport.base import Meta, Ready
from pipecut.run.transport.distributed import DistributedTransport
from pipecut.schedule.registry import FAMILIES
from tests.run.distributed.failing_models import Party
from tests.run.distributed.training_cases import check_schedule
from tests.support.live_memory import live_tensors, without_collector
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed


class Mixed(nn.Module):
    """Numbers, truth values, a complex value with a lazy conjugation, a value without elements, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.linear(x)
        turned = torch.view_as_complex(x.view(-1, 2, 2)).conj()
        return x.t().contiguous().t(), x.mean(), x > 0, turned, x[:, :0], x.argmax(1), x.expand(2, *x.shape)[1]


class Together(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mean: Tensor, mask: Tensor, turned: Tensor, *others: Tensor) -> Tensor:
        empty, index, last = others
        joined = torch.cat([x * mask, empty], 1) + mean * index[:, None] + last
        return self.linear(joined) * torch.view_as_real(turned.conj().resolve_conj()).flatten(1)


def send_all_kinds(rank: int) -> None:
    torch.manual_seed(0)
    parts = [Mixed(), Together()]
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    for part, target in zip(x.split([3, 2, 2, 2]), y.split([3, 2, 2, 2]), strict=True):
        (F.mse_loss(parts[1](*parts[0](part)), target) * len(part) / 9).backward()
    expected = {name: parameter.grad for name, parameter in parts[rank].named_parameters()}
    parts[rank].zero_grad(set_to_none=True)
    schedule = Schedule1F1B(PipelineStage(parts[rank], rank, 2, "cpu"), 4, F.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), target=y if rank == 1 else None)
    for name, parameter in parts[rank].named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


def test_values_of_all_kinds(two_ranks: Ranks) -> None:
    two_ranks.run(send_all_kinds)


def train_in_groups(rank: int) -> float:
    """Two pipelines of two ranks each, with data of their own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    place = dist.get_rank(group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(8, 4) + rank % 2
    loss = F.mse_loss(model(x), x)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model[place].named_parameters()}
    schedule = Schedule1F1B(PipelineStage(model[place], place, 2, "cpu", group=group), 4, F.mse_loss)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        schedule.step(*((x,) if place == 0 else ()), target=x if place == 1 else None)
    for name, parameter in model[place].named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)
    assert abs(schedule.mean_loss() - loss.item()) < 1e-6
    return schedule.mean_loss()


def test_pipelines_on_some_of_the_ranks(four_ranks: Ranks) -> None:
    losses = four_ranks.run(train_in_groups)
    assert losses[0] == losses[2] != losses[1] == losses[3]


def count_tensors(rank: int, traced: bool) -> tuple[list[int], int]:
    party = Party(rank, 2, traced, microbatches=6)
    schedule = party.schedule()

    def run() -> None:
        schedule.step(*party.args, target=party.target)
        schedule.eval(*party.args, target=party.target)

    run()
    counts = []
    with without_collector():
        for step in range(50):
            run()
            if step % 7 == 0:
                counts.append(len(live_tensors()))
        return counts, gc.collect()


@pytest.mark.parametrize("traced", [True, False])
def test_no_tensor_is_left_alive_over_fifty_steps(two_ranks: Ranks, traced: bool) -> None:
    for counts, collected in two_ranks.run(count_tensors, traced):
        # gloo's thread may let go of a tensor a moment later.
        assert min(counts) == min(counts[4:]), counts
        assert max(counts) - min(counts) <= 2, counts
        assert collected == 0


class OneQueue(DistributedTransport):
    """As with NCCL: what a pair of ranks sends and receives happens in one order, and each waits for those before."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta) -> None:
        super().__init__(group, device, timeout)
        self.receives_ahead = False

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        super().send(peer, tensors)
        self.finish()

    def receive(self, peer: int, metas: Sequence[Meta]) -> Any:
        return Ready(super().receive(peer, metas).wait())


def train_in_one_queue(rank: int, world: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "DistributedTransport", OneQueue)
        patch.setenv("PIPECUT_TRANSPORT", "process_group")
        check_schedule(rank, world, name, True, [world * FAMILIES[name].chunks + 1])


@pytest.mark.parametrize(
    "name",
    sampled((name for name in FAMILIES if name != "ForwardOnly"), lambda name: name == "Interleaved1F1B"),
)
def test_no_order_of_messages_blocks_a_backend_that_has_one_queue_for_a_pair(four_ranks: Ranks, name: str) -> None:
    """Receives posted ahead of sends, which is good for gloo, would have hung NCCL."""
    four_ranks.run(train_in_one_queue, 4, name)


@pytest.mark.parametrize(
    ("config", "device", "ahead"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cuda", False),
        ("cuda:nccl", "cpu", False),
    ],
)
def test_receives_are_posted_ahead_where_the_backend_can(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str, ahead: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    assert DistributedTransport(None, torch.device(device)).receives_ahead is ahead


def wait_twice(rank: int) -> None:
    transport = DistributedTransport(None, torch.device("cpu"))
    if rank == 0:
        transport.send(1, [torch.ones(3)])
        transport.finish()
    else:
        posted = transport.receive(0, [Meta((3,), torch.float32, False)])
        for _ in range(2):
            torch.testing.assert_close(posted.wait(), [torch.ones(3)])


def test_a_parcel_may_be_waited_for_twice(two_ranks: Ranks) -> None:
    """A custom function that waits for what it is about to use hung at the second time."""
    two_ranks.run(wait_twice)
