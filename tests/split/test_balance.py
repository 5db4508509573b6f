"""The min-max cut against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecut.split.balance import cheapest_cuts, lightest_bottleneck


def all_cuts(count: int, parts: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, count), parts - 1))


def heaviest(weights: list[int], cuts: tuple[int, ...]) -> int:
    bounds = [0, *cuts, len(weights)]
    return max(sum(weights[begin:end]) for begin, end in itertools.pairwise(bounds))


chains = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=8)


@given(chain=chains, parts=st.integers(1, 8))
def test_no_cut_has_a_lighter_bottleneck(chain: list[tuple[int, int]], parts: int) -> None:
    weights = [weight for weight, _ in chain]
    parts = min(parts, len(weights))
    best = min(heaviest(weights, cuts) for cuts in all_cuts(len(weights), parts))
    assert lightest_bottleneck(weights, parts) == best


@given(chain=chains, parts=st.integers(1, 8), slack=st.integers(0, 20))
def test_among_the_cuts_within_the_limit_the_cheapest_is_found(
    chain: list[tuple[int, int]], parts: int, slack: int
) -> None:
    weights = [weight for weight, _ in chain]
    prices = [price for _, price in chain][:-1]
    parts = min(parts, len(weights))
    limit = lightest_bottleneck(weights, parts) + slack
    within = [cuts for cuts in all_cuts(len(weights), parts) if heaviest(weights, cuts) <= limit]

    def price(cuts: tuple[int, ...] | list[int]) -> int:
        return sum(prices[cut - 1] for cut in cuts)

    found = cheapest_cuts(weights, prices, parts, limit)
    assert tuple(found) in within
    assert price(found) == min(map(price, within))


def test_a_limit_that_nothing_satisfies_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 chunks do not fit in 2 runs of at most 3"):
        cheapest_cuts([2, 2, 2], [0, 0], 2, 3)
