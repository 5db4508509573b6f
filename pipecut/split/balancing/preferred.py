"""Among the cuts within a limit the one of the least price: little to send, outer modules."""

from __future__ import annotations

import math

import numpy as np

from .memory import Positions
from .problem import Array
from .reach import Reach, Reached

# Places that are looked at for each cut; beyond them only the cheapest ones.
MOST_PLACES = 600


def preferred_cuts(reach: Reach, limit: float) -> list[int]:
    """Cuts with every stage within the limit, and among them the least sum of prices.

    The sum is the least of all where each cut has at most MOST_PLACES places to go to.
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
    """For each number of stages the bounds that can be reached, and from which the rest can be."""
    path = reach.path(reached, limit)
    active = [np.array([reach.blocks.count])]
    for stage in range(reach.ranks.stages - 1, 0, -1):
        fine = np.flatnonzero(reached[stage] & reach.begins_of(stage, active[0], limit))
        if len(fine) > MOST_PLACES:
            cheapest = fine[np.argsort(prices[fine], kind="stable")[:MOST_PLACES]]
            fine = np.union1d(cheapest, [path[stage - 1]])
        active.insert(0, fine)
    return [np.array([0]), *active]
