"""Figures of a step: its loss, its speed, and how each rank spent the time.

Every rank measures itself. The figures of all ranks are known on each of them, for they travel with the agreement at
the end of the step: each rank adds its own to a row of zeros.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError
from ..schedule import Plan
from ..text import counted, format_bytes
from .connection import Connection
from .inputs import Given
from .loss import BatchLoss
from .transport import Interval, TimedTransport, Turn

TokenCounter = Callable[..., int]
_ZEROS = (0.0, 0.0, 0.0, 0.0)  # in place of another rank's seconds, waiting, sending and memory
_TOKEN_DIMS = 2  # that tokens have at least: samples and positions


@dataclass(frozen=True)
class RankMetrics:
    """Times of one rank in a step, in seconds, and its peak of memory.

    With copies of the pipeline (DDP, FSDP) each figure is the mean over the copies of the rank.
    """

    computing: float  # all that is neither waiting nor sending: also the loss, and the work of the schedule itself
    waiting: float  # for values, gradients and sums of other ranks, and at the end for the last of them
    sending: float  # in which the rank could not go on because of what it sent
    bubble_rate: float  # the part of the step in which it did not compute
    peak_memory: int  # bytes, since the process began

    def __repr__(self) -> str:
        times = (("computing", self.computing), ("waiting", self.waiting), ("sending", self.sending))
        spent = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times)
        return f"{spent}, bubble {self.bubble_rate:.1%}, peak memory {format_bytes(self.peak_memory, 3)}"


@dataclass(frozen=True)
class StepMetrics:
    """Figures of a step or an evaluation, the same on every rank."""

    loss: float | None  # None if there was none
    samples: int  # of the batch, over all copies of the pipeline
    tokens: int | None  # None if the inputs hold none
    seconds: float  # from when all ranks know the batch until the last of them is done
    ranks: tuple[RankMetrics, ...]

    @property
    def samples_per_second(self) -> float:
        """Samples of the batch per second of the step; what comes between steps is not in it."""
        return self.samples / self.seconds if self.seconds else math.nan

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the batch per second of the step."""
        if self.tokens is None:
            return None
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def bubble_rate(self) -> float:
        """The part of all ranks' time in which they did not compute."""
        return sum(rank.bubble_rate for rank in self.ranks) / len(self.ranks)

    @property
    def peak_memory(self) -> int:
        """Bytes of the rank that has had most."""
        return max(rank.peak_memory for rank in self.ranks)

    def __repr__(self) -> str:
        loss = "no loss" if self.loss is None else f"loss {self.loss:.4g}"
        batch, speed = counted(self.samples, "sample"), f"{self.samples_per_second:.4g} samples/s"
        if self.tokens is not None:
            batch, speed = (
                f"{batch} ({counted(self.tokens, 'token')})",
                f"{speed}, {self.tokens_per_second:.4g} tokens/s",
            )
        lines = [f"{loss}, {batch} in {self.seconds:.4g} s: {speed}, bubble {self.bubble_rate:.1%}"]
        return "\n".join([*lines, *(f"  rank {number}: {rank}" for number, rank in enumerate(self.ranks))])


@dataclass(frozen=True)
class _Times:
    """Intervals of a step on the ranks of this process."""

    whole: Interval
    waits: Sequence[Interval] = ()
    sends: Sequence[Interval] = ()
    turns: Sequence[Turn] = ()


class Meter:
    """Measures the steps of a schedule on the ranks that are in this process."""

    def __init__(self, connection: Connection, plan: Plan, device: torch.device) -> None:
        self._here = connection.ranks
        self._transport = connection.transports[0]
        self._clock = connection.clock
        self._ranks = plan.ranks
        self._has_inputs = plan.placement.rank_of[0] in self._here
        self._device = device
        self._copies = _copies(connection.copies)
        self._batch = (0, 0)  # samples and tokens, on the rank of the first stage
        self._begin: Any = None
        self._late: _Times | None = None  # of the step before, where the clock is late
        self.loss = BatchLoss()  # of the last step
        self._figures: Sequence[float] = ()  # of the last step, from all ranks

    def begin(self, samples: Sequence[int], given: Given, counter: TokenCounter | None) -> None:
        """Begin to measure a step, and forget the one before: all ranks know the batch by now."""
        self.loss, self._figures = BatchLoss(), ()
        if self._has_inputs:
            self._batch = (sum(samples), _count_tokens(given.args, given.kwargs, counter))
        if isinstance(self._transport, TimedTransport):
            self._transport.begin()
        self._begin = self._clock.now()

    def own_figures(self, loss: BatchLoss, turns: Sequence[Turn]) -> list[float]:
        """Return the loss and the figures of this process, among zeros for all others; a sum over ranks has all."""
        whole, timed = (self._begin, self._clock.now()), self._transport
        known: _Times | None = (
            _Times(whole, timed.waits, timed.sends) if isinstance(timed, TimedTransport) else _Times(whole, turns=turns)
        )
        if self._clock.is_late:
            known, self._late = self._late, known
        figures = [*loss.numbers, *(float(number * self._copies) for number in self._batch)]
        memory = _peak_memory(self._device)
        for rank in range(self._ranks):
            figures += [*self._times_of(rank, known), memory] if rank in self._here else _ZEROS
        return figures

    def _times_of(self, rank: int, times: _Times | None) -> tuple[float, float, float]:
        """Return the seconds of a rank until the agreement, those in which it waited, and those in which it sent."""
        if times is None:
            return math.nan, math.nan, math.nan
        seconds = self._clock.seconds
        waits = [*times.waits, *(interval for turn, interval in times.turns if turn != rank)]
        return seconds(times.whole), sum(map(seconds, waits)), sum(map(seconds, times.sends))

    def note(self, figures: Sequence[float]) -> None:
        """Note the figures of all ranks, which they have agreed on."""
        of_loss = len(self.loss.numbers)
        self.loss, self._figures = BatchLoss.of(figures[:of_loss]), figures[of_loss:]

    def metrics(self) -> StepMetrics:
        """Return the figures of the last step."""
        if not self._figures:
            raise InputError("last_step() has no figures: no step() or eval() was called yet, or the last one failed")
        samples, tokens, *rest = self._figures
        rows = [rest[begin : begin + len(_ZEROS)] for begin in range(0, len(rest), len(_ZEROS))]
        seconds = [row[0] for row in rows]
        whole = math.nan if any(map(math.isnan, seconds)) else max(seconds)
        return StepMetrics(
            self.loss.mean() if self.loss.count else None,
            round(samples),
            round(tokens) or None,
            whole,
            tuple(_rank_metrics(whole, *row) for row in rows),
        )


def _rank_metrics(whole: float, seconds: float, waiting: float, sending: float, memory: float) -> RankMetrics:
    """Return the figures of a rank; one that is done early waits for the last."""
    computing = seconds - waiting - sending
    return RankMetrics(computing, waiting + whole - seconds, sending, 1 - computing / whole, round(memory))


def _peak_memory(device: torch.device) -> float:
    """Return the most bytes of the device that the process has held at a time; on a CPU, of its resident memory."""
    if torch.accelerator.is_available() and device.type not in ("cpu", "meta"):
        return float(torch.accelerator.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _copies(groups: Sequence[dist.ProcessGroup]) -> int:
    """Return the number of pipelines: groups of the same ranks are of several stages, others dims of a mesh."""
    return math.prod(map(len, {frozenset(dist.get_process_group_ranks(group)) for group in groups}))


def _count_tokens(args: Sequence[Any], kwargs: Mapping[str, Any], counter: TokenCounter | None) -> int:
    """Return the number of tokens in a batch, 0 if it holds none: by the user's counter, or by the elements of ids.

    >>> ids = torch.ones(4, 8, dtype=torch.long)
    >>> _count_tokens((torch.ones(4, 3), ids), {}, None), _count_tokens((torch.ones(4, 3),), {}, None)
    (32, 0)
    >>> _count_tokens((), {"labels": ids[:, :1], "input_ids": ids}, None)
    32
    """
    if counter is not None:
        return _checked_count(counter(*args, **kwargs))
    given = kwargs.get("input_ids")
    for value in (given, *args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dtype in _ID_DTYPES and value.dim() >= _TOKEN_DIMS:
            return value.numel()
    return 0


_ID_DTYPES = (torch.int64, torch.int32)


def _checked_count(count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InputError(
            f"count_tokens returned {count!r} ({type(count).__name__}); it must return a number of tokens, an int that "
            "is not negative: int(mask.sum())"
        )
    return count
