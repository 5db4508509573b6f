"""The search on settings that it was not made for: drawn at random, from a seed that is used here and nowhere else.

Nothing in `pipecut.schedule.auto` was chosen by what comes out here; for that there are other seeds, from 0 up. With
`--rounds N` there are four settings for each round, as long as the benchmark may take; all that one likes, without an
end: `python -c "from benchmarks.searching import run; run(100)"`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from random import Random

from pipecut.schedule import Costs, FoundPlan
from pipecut.schedule.auto.problem import arrangements
from pipecut.schedule.auto.search import PARTS, search_arrangements
from pipecut.schedule.auto.timing import Budget

from .measure import Goal, console, show_goals, show_table, time_left

HELD_OUT = 16_180_339  # the first of the seeds, one for each setting
PER_ROUND = 4
SECONDS = 1.0  # the time budget of one search
RANKS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
TWICE = 2.0
# The strategies by themselves, each with the whole budget.
ALONE = {
    "patterns": {"patterns": 1.0},
    "greedy": {"greedy": 0.5, "tuned greedy": 0.5},
    "local search": {"local search": 1.0},
}


@dataclass(frozen=True)
class Setting:
    """Costs of one microbatch, and a memory limit in so many times what 1F1B holds."""

    ranks: int
    microbatches: int
    costs: Costs
    times: float

    def search(self, parts: dict[str, float]) -> FoundPlan:
        """Search a plan with one stage per rank."""
        every = arrangements(self.ranks, self.microbatches, self.costs, "loop", 1)
        return search_arrangements(every, self.times * self.ranks, "span", Budget(SECONDS), Random(0), parts)


def draw(random: Random) -> Setting:
    """Draw a setting: 4 to 64 ranks, even or uneven stages, messages that cost nothing to a fifth of a forward."""
    ranks = random.choice(RANKS)
    microbatches = max(ranks, int(ranks * random.uniform(1.0, 5.0)))
    forward = random.uniform(5, 20)
    backward_input, backward_weight = forward * random.uniform(0.8, 1.4), forward * random.uniform(0.3, 1.1)
    transfer = forward * random.choice((0.0, random.uniform(0, 0.05), random.uniform(0, 0.2)))
    kept = random.uniform(0.2, 0.9)  # of what a forward holds, until the weight gradient
    spread = random.choice((0.0, 0.0, 0.05, 0.3))
    factors = [1 + spread * random.random() for _ in range(ranks)]
    costs = Costs(
        forward=[forward * factor for factor in factors],
        backward_input=[backward_input * factor for factor in factors],
        backward_weight=[backward_weight * factor for factor in factors],
        transfer=transfer,
        memory_backward_input=kept - 1,
        memory_backward_weight=-kept,
    )
    return Setting(ranks, microbatches, costs, random.choice((1.0, 1.5, TWICE, TWICE, TWICE, 3.0)))


def run(rounds: int) -> list[Goal]:
    """Search plans for all settings, and print the gaps to the lower bound."""
    gaps: dict[float, list[float]] = {}
    beaten: list[str] = []
    for number in range(rounds * PER_ROUND):
        if time_left() < 10:
            console.print(f"ended after {number} settings: there is no time for more")
            break
        setting = draw(Random(HELD_OUT + number))
        found = setting.search(PARTS)
        gaps.setdefault(setting.times, []).append(100 * found.gap)
        others = {row.name: row.time for row in found.tried if row.time is not None}
        if found.gap > 1e-9:
            others |= {name: setting.search(parts).time for name, parts in ALONE.items()}
        beaten += [f"{name} on {HELD_OUT + number}" for name, time in others.items() if time < found.time * (1 - 1e-9)]
    show_table(
        f"Gap to the lower bound, per cent; {SECONDS:g} s for each search",
        ["memory, of 1F1B's", "settings", "median", "nine of ten", "worst"],
        [
            [f"{times:g}", str(len(all_)), *(f"{gap:.3f}" for gap in (statistics.median(all_), _nine(all_), max(all_)))]
            for times, all_ in sorted(gaps.items())
        ],
    )
    console.print("better than the search:", ", ".join(beaten) or "nothing")
    return show_goals(
        [
            Goal("median gap with twice 1F1B's memory, per cent", statistics.median(gaps[TWICE]), 0.3),
            Goal("settings and strategies that are better alone, or fixed", len(beaten), 0),
        ]
    )


def _nine(gaps: list[float]) -> float:
    return sorted(gaps)[int(0.9 * (len(gaps) - 1))]
