"""balance(): stages of a chain of blocks for ranks, with the least bottleneck, on plain numbers.

times       3   1   4   1   5   9   2   6        blocks in order
into 3:     3   1   4   1 | 5   9 | 2   6        the longest stage is as short as it can be: 14
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import SplitError
from .balancing.chunked import ChunkedCuts
from .balancing.memory import Memory
from .balancing.preferred import preferred_cuts
from .balancing.problem import Blocks, Ranks, Shared
from .balancing.reach import Reach

__all__ = ["Balance", "Blocks", "Ranks", "Shared", "TooLittleMemoryError", "balance"]


class TooLittleMemoryError(SplitError):
    """No cut fits. `needed` is the least memory of a rank that would do."""

    def __init__(self, text: str, needed: float) -> None:
        super().__init__(text)
        self.needed = needed


@dataclass(frozen=True)
class Balance:
    """Where stages 1, 2... begin, as numbers of blocks, and the time of each rank: compute and transfers.

    No cut has a bottleneck below `lower_bound`. `memory` is that of each rank, 0 where no memory was given.

    >>> print(balance(Blocks(times=(3, 1, 4, 1, 5, 9, 2, 6)), 3))
    3 stages on 3 ranks: bottleneck 14, mean 10.33 (1.355 times the mean), lower bound 14 (proven best)
    """

    cuts: tuple[int, ...]
    loads: tuple[float, ...]
    bottleneck: float
    mean: float
    lower_bound: float
    memory: tuple[float, ...] = ()

    @property
    def is_best(self) -> bool:
        """Whether it is proven that no cut has a smaller bottleneck."""
        return self.bottleneck <= self.lower_bound * (1 + 1e-9)

    @property
    def imbalance(self) -> float:
        """The bottleneck as a multiple of the mean; 1 is perfect."""
        return self.bottleneck / self.mean if self.mean else 1.0

    def __str__(self) -> str:
        gap = self.bottleneck / self.lower_bound - 1 if self.lower_bound else 0.0
        proof = "proven best" if self.is_best else f"at most {gap:.1%} above the best"
        stages = len(self.cuts) + 1
        return (
            f"{stages} stage{'s' * (stages > 1)} on {len(self.loads)} rank{'s' * (len(self.loads) > 1)}: "
            f"bottleneck {self.bottleneck:.4g}, mean {self.mean:.4g} ({self.imbalance:.3f} times the mean), "
            f"lower bound {self.lower_bound:.4g} ({proof})"
        )


def balance(
    blocks: Blocks,
    stages: int | Sequence[int],
    *,
    speeds: Sequence[float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    in_flight: Sequence[float] | Callable[[int], float] | None = None,
    slack: float = 0.0,
) -> Balance:
    """Cut a chain so that the rank with the most to do has the least to do.

    `stages` is their number, or the rank of each stage, such as [0, 1, 1, 0] for a V. A rank takes the time of its
    blocks, divided by its speed, and the transfers at its cuts to other ranks. `memory_limit` is for each rank, or one
    for all; `in_flight` says how many microbatches a stage holds at once, 1 if left out. `slack` accepts a bottleneck
    that is longer by this share for a smaller sum of `prices`.

    With one stage a rank the cut is exact. With several it is exact if the search ends within its budget; otherwise
    `lower_bound` says how far from the best it can be.

    >>> balance(Blocks(times=(3, 1, 4, 1, 5, 9, 2, 6)), 3).cuts
    (4, 6)
    >>> balance(Blocks(times=(4, 4, 4, 4)), 2, speeds=[1, 3]).cuts
    (1,)
    >>> balance(Blocks(times=(1, 1, 1, 1, 1, 5)), [0, 1, 1, 0]).loads
    (6.0, 4.0)
    """
    ranks = Ranks.of(stages, speeds, memory_limit, in_flight)
    if ranks.stages > blocks.count:
        raise SplitError(
            f"{ranks.stages} stages were asked for, and there are {blocks.count} blocks: each stage needs at least one"
        )
    cuts, bound = _exact(blocks, ranks, slack) if ranks.one_stage_each else _searched(blocks, ranks)
    chunked = ChunkedCuts(blocks, ranks)
    loads = tuple(chunked.loads(cuts))
    needs = tuple(chunked.memory(cuts))
    return Balance(tuple(cuts), loads, max(loads), sum(loads) / len(loads), min(bound, max(loads)), needs)


def _exact(blocks: Blocks, ranks: Ranks, slack: float) -> tuple[list[int], float]:
    reach = Reach(blocks, ranks)
    least = reach.least()
    if least is None:
        raise _no_cut_fits(blocks, ranks)
    return preferred_cuts(reach, least * (1 + slack)), least


def _searched(blocks: Blocks, ranks: Ranks) -> tuple[list[int], float]:
    """Start from stages that are balanced each by itself, as well."""
    chunked = ChunkedCuts(blocks, ranks)
    held = [ranks.rank_of.count(rank) for rank in ranks.rank_of]
    alone = Ranks(
        tuple(range(ranks.stages)),
        tuple(ranks.speeds[rank] / number for rank, number in zip(ranks.rank_of, held, strict=True)),
        tuple(ranks.memory[rank] / number for rank, number in zip(ranks.rank_of, held, strict=True)),
        ranks.in_flight,
    )
    starts = []
    for each in (alone, Ranks(alone.rank_of, alone.speeds, (math.inf,) * ranks.stages, alone.in_flight)):
        reach = Reach(blocks, each)
        least = reach.least()
        if least is not None:
            starts.append(preferred_cuts(reach, least))
    cuts, certain = chunked.find(starts)
    excess, bottleneck = chunked.quality(cuts)
    if excess > 0:
        raise _no_cut_fits(blocks, ranks, 1 + excess, certain)
    return cuts, bottleneck if certain else chunked.lower_bound()


def _no_cut_fits(
    blocks: Blocks, ranks: Ranks, factor: float | None = None, certain: bool = True
) -> TooLittleMemoryError:
    """Say the least memory that would do."""
    factor = _least_factor(blocks, ranks) if factor is None else factor
    limits = [limit for limit in ranks.memory if math.isfinite(limit)]
    given = as_bytes(limits[0]) if len(set(ranks.memory)) == 1 else f"[{', '.join(map(as_bytes, ranks.memory))}]"
    needed = (
        as_bytes(limits[0] * factor)
        if len(set(ranks.memory)) == 1
        else f"{factor:.3g} times that on every limited rank"
    )
    heaviest = max(range(blocks.count), key=lambda block: Memory(blocks, min(ranks.in_flight)).of(block, block + 1))
    word = "the least that would do is" if certain else "a cut is known that needs"
    text = (
        f"no cut into {ranks.stages} stages fits memory_limit={given}: {word} {needed}. "
        f"The block that needs most is {blocks.name(heaviest)}, with "
        f"{as_bytes(Memory(blocks, min(ranks.in_flight)).of(heaviest, heaviest + 1))}. "
        "Use more stages, smaller microbatches, or checkpoint activations"
    )
    return TooLittleMemoryError(text, max(limits) * factor)


def _least_factor(blocks: Blocks, ranks: Ranks) -> float:
    """The least factor on all limits with which a cut exists."""
    low, high = 1.0, 2.0
    while Reach(blocks, ranks.with_memory(high)).within(math.inf) is None:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if Reach(blocks, ranks.with_memory(middle)).within(math.inf) is None:
            low = middle
        else:
            high = middle
    return high


def as_bytes(size: float) -> str:
    """A size in words.

    >>> as_bytes(2_500_000), as_bytes(12)
    ('2.5 MB', '12 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.4g} B"
