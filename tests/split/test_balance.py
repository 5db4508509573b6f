"""The min-max cut against brute force, on plain numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecut.errors import SplitError, TooLittleMemoryError
from pipecut.split.balance import solve as preferred
from pipecut.split.balance.problem import Memory
from pipecut.split.balance.reach import least_memory_cuts
from pipecut.split.balance.solve import Balance, Blocks, Ranks, Shared, balance_stages
from tests.support.properties import examples

times = st.integers(0, 30).map(float)


@st.composite
def chains(draw: st.DrawFn, most: int = 8) -> Blocks:
    """A chain with transfers and memory, and something that several blocks share."""
    count = draw(st.integers(1, most))
    several = st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True).map(sorted).map(tuple)
    shared = st.builds(Shared, several, st.integers(0, 9).map(float), st.integers(0, 9).map(float))

    def numbers(length: int, top: int) -> tuple[float, ...]:
        return tuple(map(float, draw(st.lists(st.integers(0, top), min_size=length, max_size=length))))

    return Blocks(
        times=numbers(count, 30),
        transfers=numbers(count - 1, 9),
        kept=numbers(count, 9),
        saved=numbers(count, 9),
        shared=tuple(draw(st.lists(shared, max_size=2))),
        prices=numbers(count - 1, 9),
    )


def all_cuts(count: int, parts: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, count), parts - 1))


def rank_loads(blocks: Blocks, ranks: Ranks, cuts: Sequence[int]) -> list[float]:
    """The definition, in plain Python."""
    bounds = [0, *cuts, blocks.count]
    loads = [0.0] * ranks.ranks
    for stage, rank in enumerate(ranks.rank_of):
        begin, end = bounds[stage], bounds[stage + 1]
        loads[rank] += sum(blocks.times[begin:end]) / ranks.speeds[rank]
        if stage and ranks.rank_of[stage - 1] != rank:
            loads[rank] += blocks.transfers[begin - 1]
        if stage + 1 < ranks.stages and ranks.rank_of[stage + 1] != rank:
            loads[rank] += blocks.transfers[end - 1]
    return loads


def rank_memory(blocks: Blocks, ranks: Ranks, cuts: Sequence[int]) -> list[float]:
    """The definition, in plain Python."""
    bounds = [0, *cuts, blocks.count]
    needs = [0.0] * ranks.ranks
    for stage, rank in enumerate(ranks.rank_of):
        begin, end = bounds[stage], bounds[stage + 1]
        items = [item for item in blocks.shared if any(begin <= block < end for block in item.blocks)]
        needs[rank] += sum(blocks.kept[begin:end]) + sum(item.kept for item in items)
        needs[rank] += ranks.in_flight[stage] * (sum(blocks.saved[begin:end]) + sum(item.saved for item in items))
    return needs


def fitting(blocks: Blocks, ranks: Ranks) -> list[tuple[int, ...]]:
    return [
        cuts
        for cuts in all_cuts(blocks.count, ranks.stages)
        if all(need <= limit for need, limit in zip(rank_memory(blocks, ranks, cuts), ranks.memory, strict=True))
    ]


def check_against_all(blocks: Blocks, ranks: Ranks, found: Balance) -> None:
    best = min(max(rank_loads(blocks, ranks, cuts)) for cuts in fitting(blocks, ranks))
    assert found.cuts in fitting(blocks, ranks)
    assert found.bottleneck == pytest.approx(best, rel=1e-8, abs=1e-12)
    assert found.lower_bound <= best * (1 + 1e-8)
    assert found.loads == pytest.approx(rank_loads(blocks, ranks, found.cuts))
    assert found.memory == pytest.approx(rank_memory(blocks, ranks, found.cuts))


@given(blocks=chains(), data=st.data())
def test_no_cut_has_a_smaller_bottleneck(blocks: Blocks, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, blocks.count))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=parts, max_size=parts))
    found = balance_stages(blocks, parts, speeds=speeds)
    check_against_all(blocks, Ranks.of(parts, speeds), found)
    assert found.is_best


@given(blocks=chains(), data=st.data())
def test_under_a_memory_limit_too(blocks: Blocks, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, blocks.count))
    limits = data.draw(st.lists(st.integers(5, 90).map(float), min_size=parts, max_size=parts))
    in_flight = [parts - stage for stage in range(parts)]
    ranks = Ranks.of(parts, None, limits, in_flight)
    if fitting(blocks, ranks):
        found = balance_stages(blocks, parts, memory_limit=limits, in_flight=lambda stage: parts - stage)
        check_against_all(blocks, ranks, found)
    else:
        with pytest.raises(SplitError, match="no cut into"):
            balance_stages(blocks, parts, memory_limit=limits, in_flight=in_flight)


PLACEMENTS = [(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 0, 1), (1, 0, 1)]


@settings(max_examples=examples(15))
@given(blocks=chains(), rank_of=st.sampled_from(PLACEMENTS), limit=st.sampled_from([None, 40.0, 120.0]))
def test_stages_of_a_rank_are_balanced_together(blocks: Blocks, rank_of: tuple[int, ...], limit: float | None) -> None:
    ranks = Ranks.of(rank_of, None, limit)
    if len(rank_of) > blocks.count:
        with pytest.raises(SplitError, match="each stage needs at least one"):
            balance_stages(blocks, rank_of)
    elif fitting(blocks, ranks):
        check_against_all(blocks, ranks, balance_stages(blocks, rank_of, memory_limit=limit))
    else:
        with pytest.raises(SplitError, match="no cut into"):
            balance_stages(blocks, rank_of, memory_limit=limit)


@settings(max_examples=examples(15))
@given(
    blocks=chains(),
    rank_of=st.sampled_from([*PLACEMENTS, (0, 1), (0, 1, 2)]),
    limits=st.sampled_from([(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)]),
)
def test_the_least_memory_that_would_do(blocks: Blocks, rank_of: tuple[int, ...], limits: Sequence[float]) -> None:
    """What some cut needed was said to be the least of all: 8 bytes, where 6 did."""
    limits = limits[: max(rank_of) + 1]
    flying = [1.0 + stage for stage in range(len(rank_of))]
    ranks = Ranks.of(rank_of, None, limits, flying)
    if len(rank_of) > blocks.count:
        return
    least = min(
        max(need / limit for need, limit in zip(rank_memory(blocks, ranks, cuts), limits, strict=True))
        for cuts in all_cuts(blocks.count, len(rank_of))
    )
    found = least_memory_cuts(blocks, ranks)
    assert found.certain
    assert found.share == pytest.approx(least, rel=1e-5)
    if least > 0:
        given = [found.share * limit for limit in limits]
        assert max(balance_stages(blocks, rank_of, memory_limit=given, in_flight=flying).memory) <= max(given) * (
            1 + 1e-8
        )
        less = [0.99 * limit for limit in given]
        with pytest.raises(TooLittleMemoryError, match="the least that would do is") as caught:
            balance_stages(blocks, rank_of, memory_limit=less, in_flight=flying)
        assert caught.value.needs == pytest.approx(rank_memory(blocks, ranks, found.cuts))


def test_a_large_chunked_pipeline_says_what_is_known_to_do() -> None:
    blocks = Blocks(times=(1.0,) * 120, kept=tuple(1.0 + place * 7919 % 101 for place in range(120)))
    rank_of = [*range(8), *reversed(range(8))]
    with pytest.raises(TooLittleMemoryError, match=r"a cut is known that needs ([0-9.]+) B") as caught:
        balance_stages(blocks, rank_of, memory_limit=1.0)
    needed = float(re.search(r"needs ([0-9.]+) B", str(caught.value))[1])  # type: ignore[index]
    assert needed < 1.2 * sum(blocks.kept) / 8
    assert max(balance_stages(blocks, rank_of, memory_limit=needed).memory) <= needed


@given(blocks=chains(), parts=st.integers(1, 8), slack=st.sampled_from([0.0, 0.25, 1.0]))
def test_among_the_cuts_within_the_slack_the_cheapest_is_found(blocks: Blocks, parts: int, slack: float) -> None:
    parts = min(parts, blocks.count)
    ranks = Ranks.of(parts)
    best = min(max(rank_loads(blocks, ranks, cuts)) for cuts in all_cuts(blocks.count, parts))
    # A rounding wider than that of the search: a cut that is just at the limit may be taken or not.
    within = [
        cuts
        for cuts in all_cuts(blocks.count, parts)
        if max(rank_loads(blocks, ranks, cuts)) <= best * (1 + slack) + 1e-9
    ]

    def price(cuts: Sequence[int]) -> float:
        return sum(blocks.prices[cut - 1] for cut in cuts)

    found = balance_stages(blocks, parts, slack=slack)
    assert found.cuts in within
    assert price(found.cuts) == min(map(price, within))


@given(blocks=chains(), in_flight=st.integers(0, 4), limit=st.integers(0, 60))
def test_the_earliest_begin_is_the_first_that_fits(blocks: Blocks, in_flight: int, limit: int) -> None:
    memory = Memory(blocks, in_flight)
    assert memory._slide(limit + 1e-9).tolist() == memory._halve(limit + 1e-9).tolist()
    expected = [
        next((begin for begin in range(end) if memory.of(begin, end) <= limit), end) for end in range(blocks.count + 1)
    ]
    assert memory.earliest(limit).tolist() == expected


def uniform(blocks: Blocks, parts: int) -> list[int]:
    """The same number of blocks to each stage."""
    return [round(blocks.count * stage / parts) for stage in range(1, parts)]


def by_amount(amounts: Sequence[float], parts: int) -> list[int]:
    """Cut where the running sum passes each part of the total: by parameters, or by time."""
    sums = list(itertools.accumulate(amounts))
    cuts: list[int] = []
    for stage in range(1, parts):
        nearest = next(place for place, done in enumerate(sums, start=1) if done >= sums[-1] * stage / parts)
        cuts.append(min(max(nearest, (cuts[-1] if cuts else 0) + 1), len(amounts) - parts + stage))
    return cuts


def greedy(blocks: Blocks, parts: int) -> list[int]:
    """Fill a stage up to the mean, then the next one."""
    mean, load = sum(blocks.times) / parts, 0.0
    cuts: list[int] = []
    for place, time in enumerate(blocks.times):
        left = parts - 1 - len(cuts)
        if (
            place
            and left
            and (load + time > mean or blocks.count - place == left)
            and place > (cuts[-1] if cuts else 0)
        ):
            cuts.append(place)
            load = 0.0
        load += time
    return cuts


def block_partition(blocks: Blocks, parts: int) -> list[int]:
    """The lightest heaviest part by compute alone, as torchgpipe balances; transfers are not looked at."""
    costs = Blocks(times=blocks.times)
    ranks = Ranks.of(parts)

    def heaviest(cuts: Iterable[int]) -> float:
        return max(rank_loads(costs, ranks, tuple(cuts)))

    return list(min(all_cuts(blocks.count, parts), key=heaviest))


@given(blocks=chains(most=10), parts=st.integers(1, 10))
def test_never_worse_than_published_rules(blocks: Blocks, parts: int) -> None:
    parts = min(parts, blocks.count)
    ranks = Ranks.of(parts)
    found = balance_stages(blocks, parts)
    rules = (
        uniform(blocks, parts),
        by_amount(blocks.kept, parts),
        by_amount(blocks.times, parts),
        greedy(blocks, parts),
        block_partition(blocks, parts),
    )
    for cuts in rules:
        assert found.bottleneck <= max(rank_loads(blocks, ranks, cuts)) * (1 + 1e-9)


def test_a_heavy_head_gets_few_neighbours() -> None:
    blocks = Blocks(times=(1.0,) * 12 + (4.0,))
    found = balance_stages(blocks, 4)
    assert found.bottleneck == 4.0
    assert found.cuts[-1] == 12


def test_transfers_count_on_both_sides() -> None:
    blocks = Blocks(times=(5.0, 5.0, 5.0, 5.0), transfers=(0.0, 9.0, 0.0))
    assert balance_stages(blocks, 2).cuts != (2,)
    assert balance_stages(blocks, 2).bottleneck == 15.0


def test_within_a_rank_nothing_is_sent() -> None:
    blocks = Blocks(times=(2.0, 2.0, 2.0), transfers=(1.0, 50.0))
    assert balance_stages(blocks, [0, 1, 1]).loads == (3.0, 5.0)


@pytest.mark.slow
def test_a_large_chunked_pipeline_is_near_its_lower_bound() -> None:
    blocks = Blocks(times=tuple(1.0 + (place % 7) / 10 for place in range(500)))
    for rank_of in ([*range(8)] * 4, [*range(8), *reversed(range(8))]):
        found = balance_stages(blocks, rank_of)
        assert found.bottleneck <= found.lower_bound * 1.03
        assert found.bottleneck < max(rank_loads(blocks, Ranks.of(rank_of), uniform(blocks, len(rank_of)))) * (1 + 1e-9)


@pytest.mark.slow
def test_fifty_thousand_blocks_into_64_stages() -> None:
    count = 50_000
    blocks = Blocks(
        times=tuple(1.0 + (place * 7919 % 101) / 100 for place in range(count)),
        transfers=tuple(float(place * 31 % 17) for place in range(count - 1)),
        saved=(1.0,) * count,
        prices=tuple(float(place * 13 % 19) for place in range(count - 1)),
        shared=(Shared((0, count - 1), kept=50.0),),
    )
    found = balance_stages(blocks, 64, memory_limit=2.0e4, in_flight=[min(64 - stage, 16) for stage in range(64)])
    assert found.is_best
    assert found.imbalance < 1.05


def test_few_places_keep_the_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferred, "_MOST_PLACES", 2)
    blocks = Blocks(times=(1.0,) * 20 + (30.0,), prices=tuple(float(place % 3) for place in range(20)))
    found = balance_stages(blocks, 4)
    assert found.bottleneck == 30.0
    assert found.is_best


def test_the_text_has_bottleneck_mean_and_lower_bound() -> None:
    assert str(balance_stages(Blocks(times=(1, 1, 2)), 2)) == (
        "2 stages on 2 ranks: bottleneck 2, mean 2 (1.000 times the mean), lower bound 2 (proven best)"
    )
    assert str(Balance((1,), (3.0, 1.0), 3.0, 2.0, 2.5)) == (
        "2 stages on 2 ranks: bottleneck 3, mean 2 (1.500 times the mean), lower bound 2.5 "
        "(at most 20.0% above the best)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blocks(times=(1.0, math.nan)), r"times\[1\] is nan, not a finite number"),
        (lambda: Blocks(times=(1.0, -2.0)), r"times\[1\] is -2.0, negative: costs are finite numbers, 0 or more"),
        (lambda: Blocks(times=(1.0, 2.0), transfers=(math.inf,)), r"transfers\[0\] is inf"),
        (lambda: Blocks(times=(1.0, 2.0), transfers=(1.0, 2.0)), "transfers has 2 numbers, and 2 blocks need 1"),
        (lambda: Blocks(times=()), "there is no block"),
        (lambda: Blocks(times=(1.0,), shared=(Shared((0,), kept=-1.0),)), r"shared.kept\[0\] is -1.0, negative"),
        (
            lambda: balance_stages(Blocks(times=(1.0, 2.0)), 2, speeds=[1.0, 0.0]),
            r"speeds\[1\] is 0.0: rank 1 would never finish",
        ),
        (
            lambda: balance_stages(Blocks(times=(1.0, 2.0)), 2, speeds=[1.0]),
            "speeds has 1 numbers, and there are 2 ranks",
        ),
        (lambda: balance_stages(Blocks(times=(1.0, 2.0)), 2, memory_limit=0), "memory_limit of rank 0 is 0.0"),
        (
            lambda: balance_stages(Blocks(times=(1.0, 2.0)), 2, in_flight=[1]),
            "in_flight has 1 numbers, and there are 2 stages",
        ),
        (lambda: balance_stages(Blocks(times=(1.0, 2.0)), 3), "3 stages were asked for, and there are 2 blocks"),
        (
            lambda: balance_stages(Blocks(times=(1.0, 2.0)), [0, 2]),
            r"stages=\[0, 2\]: give their number, or the rank of each",
        ),
        (
            lambda: balance_stages(
                Blocks(times=(1.0, 2.0, 1.0), kept=(3e9, 7e9, 1e9), names=("a", "b", "c")), 2, memory_limit=5e9
            ),
            "no cut into 2 stages fits memory_limit=5 GB: the least that would do is 8 GB. "
            "The block that needs most is b, with 7 GB. Use more stages",
        ),
        (
            lambda: balance_stages(Blocks(times=(4, 4, 4, 6, 4), kept=(2, 5, 1, 3, 1)), [0, 1, 1, 0], memory_limit=1),
            "no cut into 4 stages fits memory_limit=1 B: the least that would do is 6 B",
        ),
        (
            lambda: balance_stages(Blocks(times=(1, 1), saved=(2, 3)), 2, memory_limit=1, in_flight=[2, 1]),
            "the least that would do is 4 B. The block that needs most is block 0, with 4 B",
        ),
        (
            lambda: balance_stages(Blocks(times=(1.0, 2.0), kept=(3.0, 7.0)), 2, memory_limit=[3.0, 3.5]),
            r"memory_limit=\[3 B, 3.5 B\]: the least that would do is 2 times that on every limited rank",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(SplitError, match=message):
        make()
