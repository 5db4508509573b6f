"""The exact min-max cut of a chain, on plain numbers.

weights    3   1   4   1   5   9   2   6        chunks in order
penalties    a   b   c   d   e   f   g          what a cut at each place costs besides
into 3:    3   1   4   1 | 5   9 | 2   6        the heaviest part is as light as it can be: 14
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence


def lightest_bottleneck(weights: Sequence[int], parts: int) -> int:
    """The least weight that the heaviest of `parts` non-empty runs can have.

    >>> lightest_bottleneck([3, 1, 4, 1, 5, 9, 2, 6], 3)
    14
    """
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _runs_needed(weights, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _runs_needed(weights: Sequence[int], limit: int) -> int:
    runs, load = 1, 0
    for weight in weights:
        if load + weight > limit:
            runs, load = runs + 1, 0
        load += weight
    return runs


def cheapest_cuts(weights: Sequence[int], penalties: Sequence[float], parts: int, limit: int) -> list[int]:
    """Cut into `parts` runs of at most `limit` each, with the least sum of penalties; positions of the cuts.

    `penalties[i]` is the price of a cut between chunk i and chunk i + 1.

    >>> cheapest_cuts([3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 0, 0, 0, 0, 0], 3, 14)
    [5, 7]
    """
    total = [0, *itertools.accumulate(weights)]
    count = len(weights)
    infinite = float("inf")
    price = [0.0] + [infinite] * count
    choices: list[list[int]] = []
    for _ in range(parts):
        next_price = [infinite] * (count + 1)
        choice = [-1] * (count + 1)
        window: deque[int] = deque()
        for end in range(1, count + 1):
            # Cheapest first: a start that is later and not dearer makes the earlier ones useless.
            while window and price[window[-1]] >= price[end - 1]:
                window.pop()
            window.append(end - 1)
            while window and total[end] - total[window[0]] > limit:
                window.popleft()
            if window:
                choice[end] = window[0]
                next_price[end] = price[window[0]] + (penalties[end - 1] if end < count else 0.0)
        price = next_price
        choices.append(choice)
    if price[count] == infinite:
        raise ValueError(f"{count} chunks do not fit in {parts} runs of at most {limit}")
    cuts = []
    position = count
    for choice in reversed(choices):
        position = choice[position]
        cuts.append(position)
    return cuts[-2::-1]
