"""Bubbles and memory that are known: by formula over a grid of sizes, and as published."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipecut.schedule.costs import Costs
from pipecut.schedule.registry import plan_for
from pipecut.schedule.report import Report
from pipecut.schedule.simulate import simulate

RANKS = range(1, 9)
MICROBATCHES = range(1, 17)
# F, I, W of a rank's work. In all of them W is the shortest, or as long: the zero bubble formulas hold only then.
EQUAL = (1.0, 1.0, 1.0)
TIMES = [EQUAL, (2.0, 2.0, 1.0), (4.0, 3.0, 2.0), (3.0, 4.0, 3.0)]
every_times = pytest.mark.parametrize("times", TIMES)
every_ranks = pytest.mark.parametrize("ranks", RANKS)


def run(
    name: str, ranks: int, microbatches: int, times: tuple[float, ...] = EQUAL, chunks: int | None = None
) -> Report:
    return simulate(plan_for(name, ranks=ranks, microbatches=microbatches, chunks=chunks), Costs(*times))


def longest_span(report: Report) -> float:
    """The longest time between a rank's first start and its last end."""
    return max(row[-1].end - row[0].start for row in report.timeline.by_rank)


# ---------------------------------------------------------------- bubbles, by formula


@every_times
@every_ranks
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_gpipe_and_1f1b_wait_for_every_other_rank_once(name: str, ranks: int, times: tuple[float, ...]) -> None:
    for microbatches in MICROBATCHES:
        report = run(name, ranks, microbatches, times)
        work = microbatches * sum(times)
        bubble = (ranks - 1) * sum(times)
        assert report.makespan == pytest.approx(work + bubble), microbatches
        assert report.bubble_rate_makespan == pytest.approx(bubble / (work + bubble))


@every_times
@every_ranks
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_chunks_divide_the_bubble_of_1f1b(chunks: int, ranks: int, times: tuple[float, ...]) -> None:
    """For whole rounds: the number of ranks divides that of microbatches."""
    for microbatches in range(ranks, 17, ranks):
        report = run("Interleaved1F1B", ranks, microbatches, times, chunks)
        bubble = (ranks - 1) * sum(times) / chunks
        assert report.makespan == pytest.approx(microbatches * sum(times) + bubble), microbatches


@every_times
@every_ranks
def test_zb_h1_fills_the_bubble_with_one_weight_gradient_a_rank(ranks: int, times: tuple[float, ...]) -> None:
    """From `ranks` microbatches on."""
    forward, backward_input, backward_weight = times
    for microbatches in range(ranks, 2 * ranks + 9):
        report = run("ZB-H1", ranks, microbatches, times)
        bubble = (ranks - 1) * (forward + backward_input - backward_weight)
        assert longest_span(report) == pytest.approx(microbatches * sum(times) + bubble), microbatches
        assert report.makespan == pytest.approx(microbatches * sum(times) + bubble), microbatches


@every_times
@every_ranks
def test_zb_h2_fills_the_bubble_with_two_weight_gradients_a_rank(ranks: int, times: tuple[float, ...]) -> None:
    """From `2 ranks - 1` microbatches on, and by each rank's own span: ranks start late and end late."""
    forward, backward_input, backward_weight = times
    for microbatches in range(2 * ranks - 1, 2 * ranks + 9):
        report = run("ZB-H2", ranks, microbatches, times)
        work = microbatches * sum(times)
        bubble = (ranks - 1) * (forward + backward_input - 2 * backward_weight)
        assert longest_span(report) == pytest.approx(work + bubble), microbatches
        assert report.bubble_rate == pytest.approx(bubble / (work + bubble), abs=1e-12)


@every_ranks
def test_zbv_has_no_bubble_if_all_take_equally_long(ranks: int) -> None:
    """From `2 ranks - 1` microbatches on, and by each rank's own span."""
    for microbatches in range(2 * ranks - 1, 2 * ranks + 9):
        assert run("ZBVZeroBubble", ranks, microbatches).bubble_rate == pytest.approx(0, abs=1e-12), microbatches


# ---------------------------------------------------------------- memory, in forwards of a whole rank


@every_ranks
def test_gpipe_keeps_every_microbatch(ranks: int) -> None:
    for microbatches in MICROBATCHES:
        assert run("GPipe", ranks, microbatches).peak_memory == (microbatches,) * ranks


@every_ranks
def test_1f1b_keeps_one_microbatch_for_each_rank_from_there_to_the_last(ranks: int) -> None:
    for microbatches in MICROBATCHES:
        expected = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
        assert run("1F1B", ranks, microbatches).peak_memory == expected


@every_ranks
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_keeps_the_chunks_of_its_warm_up_and_one_more(chunks: int, ranks: int) -> None:
    for microbatches in range(ranks, 17, ranks):
        peak = run("Interleaved1F1B", ranks, microbatches, chunks=chunks).peak_memory
        kept = [min((chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1, microbatches * chunks) for rank in range(ranks)]
        assert peak == pytest.approx([count / chunks for count in kept]), microbatches


@every_ranks
def test_the_zero_bubble_schedules_keep_what_they_promise(ranks: int) -> None:
    """ZB-H1 as much as 1F1B, ZB-H2 almost twice that, ZBV on every rank as much as 1F1B on its first."""
    for microbatches in MICROBATCHES:
        assert max(run("ZB-H1", ranks, microbatches).peak_memory) == min(ranks, microbatches)
        assert max(run("ZB-H2", ranks, microbatches).peak_memory) == min(2 * ranks - 1, microbatches)
        assert max(run("ZBVZeroBubble", ranks, microbatches).peak_memory) <= ranks
    assert run("ZBVZeroBubble", ranks, 2 * ranks).peak_memory == (ranks,) * ranks


# ---------------------------------------------------------------- as published

PUBLISHED = Path(__file__).parent / "published"
SAME = 0.0002
SIMILAR = 0.005  # 1F1B-I comes out somewhat above what is published, by up to 0.004994
PLANS = {"1F1B": "1F1B", "ZB-H1": "ZB-H1", "ZB-H2": "ZB-H2", "1F1B-I": "Interleaved1F1B"}

Setting = tuple[str, int, int, Costs, float]  # schedule, ranks, microbatches, costs of a rank, published rate


def settings_of(table: str, columns: str, chunks: int, schedules: list[str]) -> Iterator[Setting]:
    """The rows of a table whose times are those of one of that many chunks, once for each schedule."""
    with (PUBLISHED / table).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            forward, backward_input, backward_weight, transfer = (float(row[column]) for column in columns.split())
            costs = Costs(
                forward=forward * chunks,
                backward_input=backward_input * chunks,
                backward_weight=backward_weight * chunks,
                transfer=transfer,
            )
            for schedule in schedules:
                yield schedule, int(row["p"]), int(row["m"]), costs, float(row[schedule])


def both_tables(*schedules: str) -> list[Setting]:
    return [*tables_5_and_9(*schedules), *table_8(*schedules)]


def tables_5_and_9(*schedules: str) -> list[Setting]:
    return list(settings_of("zero_bubble_table5_9.csv", "TF TB TW Tc", 1, list(schedules)))


def table_8(*schedules: str) -> list[Setting]:
    return list(settings_of("zero_bubble_table8.csv", "f b w c", 2, list(schedules)))


def rate(setting: Setting, chunks: int | None = None) -> float:
    schedule, ranks, microbatches, costs, _ = setting
    plan = plan_for(PLANS[schedule], ranks=ranks, microbatches=microbatches, chunks=chunks)
    return simulate(plan, costs).bubble_rate


def named(value: object) -> str:
    return "-".join(map(str, value[:3])) if isinstance(value, tuple) else ""


def test_all_published_rows_are_read() -> None:
    assert (len(tables_5_and_9("1F1B")), len(table_8("1F1B"))) == (6, 3)


@pytest.mark.parametrize("setting", both_tables("1F1B", "ZB-H1", "ZB-H2"), ids=named)
def test_the_published_rates_of_schedules_with_one_chunk(setting: Setting) -> None:
    assert rate(setting) == pytest.approx(setting[-1], abs=SAME)


@pytest.mark.parametrize("setting", table_8("1F1B-I"), ids=named)
def test_the_published_rates_of_interleaved_1f1b_with_two_chunks(setting: Setting) -> None:
    assert rate(setting, chunks=2) == pytest.approx(setting[-1], abs=SIMILAR)


def test_the_published_rates_of_interleaved_1f1b_fit_three_chunks_and_no_other_count() -> None:
    """The table does not say the number of chunks per rank, so that it is inferred from the rates."""
    settings = tables_5_and_9("1F1B-I")
    fitting = [
        chunks
        for chunks in (1, 2, 3, 4)
        if all(rate(setting, chunks) == pytest.approx(setting[-1], abs=SIMILAR) for setting in settings)
    ]
    assert fitting == [3]
