"""Figures of a step: what counts as samples and tokens, and how time is divided, on a clock that the test turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipelineStage, Schedule1F1B
from pipecut.errors import InputError, StepError
from pipecut.run import connection
from pipecut.run.transport import Ready, TimedTransport
from pipecut.run.transport.base import DeviceClock, HostClock, clock_of

MICROBATCHES = 4


class HandTurned:
    """A clock that shows the time that a test has let pass."""

    is_late = False

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def seconds(self, interval: tuple[float, float]) -> float:
        return interval[1] - interval[0]


class Slow(nn.Module):
    """A layer that takes some time of a clock."""

    def __init__(self, clock: Any, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.clock = clock
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.time += self.seconds
        return self.layer(x)


def schedule_of(modules: Sequence[nn.Module], loss_fn: Any = lambda output: output.square().mean()) -> Schedule1F1B:
    stages = [PipelineStage(module, index, len(modules), "cpu") for index, module in enumerate(modules)]
    return Schedule1F1B(stages, MICROBATCHES, loss_fn)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandTurned:
    clock = HandTurned()
    monkeypatch.setattr(connection, "clock_of", lambda device: clock)
    return clock


def test_in_one_process_each_rank_waits_while_the_others_compute(clock: HandTurned) -> None:
    schedule = schedule_of([Slow(clock, 3.0), Slow(clock, 1.0)])
    schedule.step(torch.randn(8, 4))
    last = schedule.last_step()
    assert last.seconds == MICROBATCHES * (3.0 + 1.0)
    assert [(rank.computing, rank.waiting, rank.sending) for rank in last.ranks] == [(12.0, 4.0, 0.0), (4.0, 12.0, 0.0)]
    assert [rank.bubble_rate for rank in last.ranks] == [0.25, 0.75]
    assert last.bubble_rate == 0.5
    assert last.samples_per_second == 0.5
    assert last.loss == schedule.mean_loss()


class Turning:
    """A transport over which everything takes time."""

    rank, ranks, receives_ahead = 0, 2, True

    def __init__(self, clock: HandTurned) -> None:
        self.clock = clock

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        self.clock.time += 1

    def receive(self, peer: int, metas: Any) -> Any:
        return SimpleNamespace(wait=self._arrive)

    def _arrive(self) -> list[Tensor]:
        self.clock.time += 10
        return []

    def share(self, source: int, numbers: list[int] | None, count: int) -> list[int]:
        self.clock.time += 100
        return [source]

    def finish(self) -> None:
        self.clock.time += 1000

    def clear(self) -> None: ...


def test_every_wait_of_a_transport_is_noted_and_none_twice() -> None:
    clock = HandTurned()
    timed = TimedTransport(Turning(clock), clock)
    arrival = timed.receive(1, [])
    timed.send(1, [])
    clock.time += 10000  # computing
    assert arrival.wait() == []
    assert timed.share(1, None, 1) == [1]
    timed.finish()
    assert sum(map(clock.seconds, timed.waits)) == 110
    assert sum(map(clock.seconds, timed.sends)) == 1001
    timed.begin()
    assert (timed.waits, timed.sends) == ([], [])


def test_an_arrival_that_is_ready_keeps_its_tensors() -> None:
    class Here(Turning):
        def receive(self, peer: int, metas: Any) -> Any:
            return Ready([torch.ones(1)])

    clock = HandTurned()
    assert TimedTransport(Here(clock), clock).receive(1, []).wait() == [torch.ones(1)]


class Event:
    """An event that a device comes to later: its time is not known before it was waited for."""

    def __init__(self, clock: HandTurned) -> None:
        self.time, self.is_known = clock.time, False

    def synchronize(self) -> None:
        self.is_known = True

    def elapsed_time(self, end: Event) -> float:
        assert end.is_known
        return 1000 * (end.time - self.time)


def test_on_a_device_times_are_those_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = HandTurned()
    monkeypatch.setattr(connection, "clock_of", lambda device: DeviceClock(lambda: Event(turned)))
    slow = Slow(turned, 3.0)
    schedule = schedule_of([slow, Slow(turned, 1.0)])
    schedule.step(torch.randn(8, 4))
    first = schedule.last_step()
    assert math.isnan(first.seconds)
    assert all(math.isnan(rank.computing) for rank in first.ranks)
    assert first.samples == 8  # not late
    slow.seconds = 30.0
    schedule.step(torch.randn(8, 4))
    assert [rank.computing for rank in schedule.last_step().ranks] == [12.0, 4.0]
    schedule.step(torch.randn(8, 4))
    assert [rank.computing for rank in schedule.last_step().ranks] == [120.0, 4.0]


def test_the_clock_of_a_cpu_is_that_of_the_host() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert clock.seconds((1_000_000_000, 2_500_000_000)) == 1.5
    begin = clock.now()
    assert clock.seconds((begin, clock.now())) >= 0


class Embeds(nn.Module):
    def forward(self, values: Tensor, input_ids: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        return values * 1.0


IDS = torch.ones(8, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ((IDS.float(),), {"labels": IDS[:, :2], "input_ids": IDS}, 40),  # by name
        ((IDS.float(),), {"labels": IDS[:, :2]}, 16),  # the first integers
        ((IDS.to(torch.int32),), {}, 40),
        ((IDS.float(),), {"labels": IDS[:, 0]}, None),  # classes of images
        ((IDS.bool(),), {}, None),  # a mask
    ],
)
def test_tokens_are_the_elements_of_ids(
    args: tuple[Tensor, ...], kwargs: dict[str, Tensor], tokens: int | None
) -> None:
    schedule = schedule_of([Embeds()])
    schedule.eval(*args, **kwargs)
    last = schedule.last_step()
    assert (last.samples, last.tokens) == (8, tokens)
    assert (last.tokens_per_second is None) == (tokens is None)


def test_tokens_are_counted_by_the_users_function() -> None:
    schedule = schedule_of([Embeds()])
    schedule.count_tokens = lambda values: int(values.sum()) + 2
    schedule.eval(IDS)
    assert schedule.last_step().tokens == 42


@pytest.mark.parametrize("count", [-1, 2.5, True, torch.tensor(3)])
def test_a_count_that_is_no_number_of_tokens_is_an_error(count: Any) -> None:
    schedule = schedule_of([Embeds()])
    schedule.count_tokens = lambda values: count
    with pytest.raises(InputError, match=r"count_tokens returned .*; it must return a number of tokens, an int"):
        schedule.eval(IDS)


def test_an_evaluation_without_a_loss_has_none() -> None:
    schedule = schedule_of([nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss)
    schedule.eval(torch.randn(8, 4))
    last = schedule.last_step()
    assert last.loss is None
    assert repr(last).startswith("no loss, 8 samples in ")
    schedule.eval(torch.randn(8, 4), target=torch.randn(8, 4))
    assert schedule.last_step().loss == schedule.mean_loss()


def fails(x: Tensor) -> Tensor:
    raise ValueError("no")


def test_before_a_step_and_after_one_that_failed_there_are_no_figures() -> None:
    loss: list[Callable[[Tensor], Tensor]] = [lambda output: output.mean()]
    schedule = schedule_of([nn.Linear(4, 4)], lambda output: loss[0](output))
    message = r"last_step\(\) has no figures: no step\(\) or eval\(\) was called yet, or the last one failed"
    with pytest.raises(InputError, match=message):
        schedule.last_step()
    schedule.step(torch.randn(8, 4))
    assert schedule.last_step().samples == 8
    loss[0] = fails
    with pytest.raises(StepError):
        schedule.step(torch.randn(8, 4))
    with pytest.raises(InputError, match=message):
        schedule.last_step()


def test_the_figures_read_well(clock: HandTurned) -> None:
    schedule = schedule_of([Slow(clock, 3.0), Slow(clock, 1.0)], lambda output: (output * 0).sum() + 2.5)
    schedule.count_tokens = lambda x: 64
    schedule.step(torch.randn(8, 4))
    last = schedule.last_step()
    first, *ranks = repr(last).splitlines()
    assert first == "loss 2.5, 8 samples (64 tokens) in 16 s: 0.5 samples/s, 4 tokens/s, bubble 50.0%"
    assert ranks[0].startswith("  rank 0: computing 12 s, waiting 4 s, sending 0 s, bubble 25.0%, peak memory ")
    assert len(ranks) == 2
    assert last.peak_memory == max(rank.peak_memory for rank in last.ranks) > 2**20
