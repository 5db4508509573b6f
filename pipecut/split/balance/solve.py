"""balance_stages(): stages of a chain of blocks for ranks, with the least bottleneck, on plain numbers.

times       3   1   4   1   5   9   2   6        blocks in order
into 3:     3   1   4   1 | 5   9 | 2   6        the longest stage is as short as it can be: 14
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import SplitError, TooLittleMemoryError
from ...text import counted, format_bytes, format_bytes_rounded_up
from .chunked import ChunkedCuts
from .problem import Array, Blocks, CutCosts, Memory, Positions, Ranks, Shared, one_rank_per_stage
from .reach import LeastMemory, Reach, Reached, least_memory_cuts

__all__ = ["Balance", "Blocks", "Ranks", "Shared", "TooLittleMemoryError", "balance_stages", "evaluate_cuts"]


@dataclass(frozen=True)
class Balance:
    """Cuts, as the blocks at which stages 1, 2... begin, and the time of each rank: compute and transfers.

    No cut has a bottleneck below `lower_bound`. `memory` is that of each rank, 0 where no memory was given.

    >>> print(balance_stages(Blocks(times=(3, 1, 4, 1, 5, 9, 2, 6)), 3))
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
        """True if it is proven that no cut has a smaller bottleneck."""
        return self.bottleneck <= self.lower_bound * (1 + 1e-9)

    @property
    def imbalance(self) -> float:
        """The bottleneck as a multiple of the mean; 1 is perfect."""
        return self.bottleneck / self.mean if self.mean else 1.0

    @property
    def proof(self) -> str:
        """Distance from the best possible cut, in words."""
        gap = self.bottleneck / self.lower_bound - 1 if self.lower_bound else 0.0
        return "proven best" if self.is_best else f"at most {gap:.1%} above the best"

    def __str__(self) -> str:
        return (
            f"{counted(len(self.cuts) + 1, 'stage')} on {counted(len(self.loads), 'rank')}: "
            f"bottleneck {self.bottleneck:.4g}, mean {self.mean:.4g} ({self.imbalance:.3f} times the mean), "
            f"lower bound {self.lower_bound:.4g} ({self.proof})"
        )


def balance_stages(
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

    With one stage per rank the cut is exact. With several it is exact if the search ends within its budget; otherwise
    `lower_bound` says how far from the best it can be.

    >>> balance_stages(Blocks(times=(3, 1, 4, 1, 5, 9, 2, 6)), 3).cuts
    (4, 6)
    >>> balance_stages(Blocks(times=(4, 4, 4, 4)), 2, speeds=[1, 3]).cuts
    (1,)
    >>> balance_stages(Blocks(times=(1, 1, 1, 1, 1, 5)), [0, 1, 1, 0]).loads
    (6.0, 4.0)
    """
    ranks = Ranks.of(stages, speeds, memory_limit, in_flight)
    if ranks.stages > blocks.count:
        raise SplitError(
            f"{ranks.stages} stages were asked for, and there are {blocks.count} blocks: each stage needs at least one"
        )
    cuts, bound = _exact(blocks, ranks, slack) if ranks.one_stage_each else _searched(blocks, ranks)
    return _balance(blocks, ranks, cuts, bound)


def evaluate_cuts(
    blocks: Blocks,
    cuts: Sequence[int],
    stages: int | Sequence[int],
    *,
    speeds: Sequence[float] | None = None,
    in_flight: Sequence[float] | Callable[[int], float] | None = None,
) -> Balance:
    """Evaluate how well given cuts are balanced.

    >>> evaluate_cuts(Blocks(times=(3, 1, 4)), [1], 2).loads
    (3.0, 5.0)
    """
    ranks = Ranks.of(stages, speeds, None, in_flight)
    return _balance(blocks, ranks, cuts, CutCosts(blocks, ranks).lower_bound())


def _balance(blocks: Blocks, ranks: Ranks, cuts: Sequence[int], bound: float) -> Balance:
    costs = CutCosts(blocks, ranks)
    loads, needs = tuple(costs.loads(list(cuts))), tuple(costs.memory(list(cuts)))
    return Balance(tuple(cuts), loads, max(loads), sum(loads) / len(loads), min(bound, max(loads)), needs)


def _exact(blocks: Blocks, ranks: Ranks, slack: float) -> tuple[list[int], float]:
    reach = Reach(blocks, ranks)
    least = reach.least()
    if least is None:
        raise _no_cut_fits(blocks, ranks, least_memory_cuts(blocks, ranks))
    return _preferred_cuts(reach, least * (1 + slack)), least


def _searched(blocks: Blocks, ranks: Ranks) -> tuple[list[int], float]:
    """Search from stages balanced each by itself too; where none fits, from the cut that needs least memory."""
    chunked = ChunkedCuts(blocks, ranks)
    each = one_rank_per_stage(ranks)
    starts = []
    for limited in (each, each.with_memory(math.inf)):
        reach = Reach(blocks, limited)
        least = reach.least()
        if least is not None:
            starts.append(_preferred_cuts(reach, least))
    cuts, certain = chunked.find(starts)
    excess, bottleneck = chunked.quality(cuts)
    if excess > 0:
        least_memory = least_memory_cuts(blocks, ranks)
        cuts, certain = chunked.find([least_memory.cuts])
        excess, bottleneck = chunked.quality(cuts)
        if excess > 0:
            raise _no_cut_fits(blocks, ranks, least_memory)
    return cuts, bottleneck if certain else chunked.lower_bound()


def _no_cut_fits(blocks: Blocks, ranks: Ranks, least_memory: LeastMemory) -> TooLittleMemoryError:
    """Make the error that says the least memory that would do."""
    if len(set(ranks.memory)) == 1:
        given, needed = format_bytes(ranks.memory[0]), format_bytes_rounded_up(max(least_memory.memory))
    else:
        given = f"[{', '.join(map(format_bytes, ranks.memory))}]"
        needed = f"{_rounded_up(least_memory.share):g} times that on every limited rank"
    bounds = [0, *least_memory.cuts, blocks.count]
    sizes = {
        block: Memory(blocks, number).of(block, block + 1)
        for number, (begin, end) in zip(ranks.in_flight, itertools.pairwise(bounds), strict=True)
        for block in range(begin, end)
    }
    heaviest = max(sizes, key=sizes.__getitem__)
    word = "the least that would do is" if least_memory.certain else "a cut is known that needs"
    text = (
        f"no cut into {ranks.stages} stages fits memory_limit={given}: {word} {needed}. "
        f"The block that needs most is {blocks.name(heaviest)}, with {format_bytes(sizes[heaviest])}. "
        "Use more stages, smaller microbatches, or checkpoint activations"
    )
    return TooLittleMemoryError(text, least_memory.memory)


def _rounded_up(number: float) -> float:
    """Round up to three digits."""
    step = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / step - 1e-9) * step


# Places that are looked at for each cut; beyond them only the cheapest ones.
_MOST_PLACES = 600


def _preferred_cuts(reach: Reach, limit: float) -> list[int]:
    """Return cuts with every stage within the limit, and among them the least sum of prices.

    The sum is the least of all where each cut has at most _MOST_PLACES places to go to.
    """
    reached = reach.within(limit)
    assert reached is not None, "the limit is one that a cut has"
    prices = np.array([0.0, *reach.blocks.prices, 0.0])
    active = _leading_to_the_end(reach, reached, limit, prices)
    paid: Array = np.zeros(1)
    choices: list[Positions] = []
    for stage in range(reach.ranks.stages):
        begins, ends = active[stage], active[stage + 1]
        choice = np.zeros(len(ends), dtype=np.int64)
        next_paid = np.full(len(ends), math.inf)
        for place, end in enumerate(ends):
            costs = np.where(reach.fits(stage, begins, int(end), limit), paid, math.inf)
            choice[place] = int(np.argmin(costs))
            next_paid[place] = costs[choice[place]] + prices[end]
        paid = next_paid
        choices.append(choice)
    place, cuts = 0, []
    for stage in range(reach.ranks.stages - 1, 0, -1):
        place = int(choices[stage][place])
        cuts.append(int(active[stage][place]))
    return cuts[::-1]


def _leading_to_the_end(reach: Reach, reached: Reached, limit: float, prices: Array) -> list[Positions]:
    """Return for each number of stages the bounds that can be reached, and from which the rest can be."""
    path = reach.path(reached, limit)
    active = [np.array([reach.blocks.count])]
    for stage in range(reach.ranks.stages - 1, 0, -1):
        fine = np.flatnonzero(reached[stage] & reach.begins_of(stage, active[0], limit))
        if len(fine) > _MOST_PLACES:
            cheapest = fine[np.argsort(prices[fine], kind="stable")[:_MOST_PLACES]]
            fine = np.union1d(cheapest, [path[stage - 1]])
        active.insert(0, fine)
    return [np.array([0]), *active]
