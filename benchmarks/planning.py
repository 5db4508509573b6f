"""Time to make, lower and prove a big plan, beside upstream's; time to simulate a huge one."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from collections.abc import Callable

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from pipecut.schedule import Costs, Plan, auto_schedule, plan_for, simulate

from .measure import Goal, in_turn, median_ratio, milliseconds, seconds, show_goals, show_table

SCHEDULE, CHUNKS, MAX_HELD = "Interleaved1F1B", 2, 3
SMALL, BIG = (8, 64), (64, 512)  # ranks, microbatches
HUGE = (64, 7813)  # 1F1B, a million computations
LARGEST = (1024, 4096)
OURS, UPSTREAM = "pipecut", "upstream"
MEGABYTE = 1024 * 1024
# ru_maxrss is in kilobytes on Linux and in bytes on macOS.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def run(rounds: int) -> list[Goal]:
    """Measure both sides and print the table and the goals."""
    sizes = {f"{ranks} ranks x {microbatches}": (ranks, microbatches) for ranks, microbatches in (SMALL, BIG)}
    sides: dict[tuple[str, str], Callable[[], float]] = {}
    for text, size in sizes.items():
        sides[text, OURS] = functools.partial(_time, size, _ours)
        sides[text, UPSTREAM] = functools.partial(_time, size, _upstream)
    times = in_turn(sides, min(rounds, 3), "planning")
    each = {key: [time / _actions(sizes[key[0]]) for time in taken] for key, taken in times.items()}
    show_table(
        f"{SCHEDULE}, {CHUNKS} chunks: generate + lower + prove; upstream constructs its schedule (CPU time, medians)",
        [
            "ranks x microbatches",
            "computations",
            "pipecut, ms",
            "upstream, ms",
            "pipecut, us each",
            "upstream, us each",
        ],
        [
            [
                text,
                f"{_actions(size):,}",
                *(milliseconds(times[text, side]) for side in (OURS, UPSTREAM)),
                *(f"{1e6 * statistics.median(each[text, side]):.2f}" for side in (OURS, UPSTREAM)),
            ]
            for text, size in sizes.items()
        ],
    )
    small, big = sizes
    huge = plan_for("1F1B", ranks=HUGE[0], microbatches=HUGE[1])
    simulating = seconds(lambda: simulate(huge, Costs()))
    return show_goals(
        [
            Goal("big plan, of upstream's time", median_ratio(times[big, OURS], times[big, UPSTREAM]), 1 / 20),
            Goal(
                "a computation of the big plan, of one of the small",
                median_ratio(each[big, OURS], each[small, OURS]),
                1.5,
            ),
            Goal("peak memory of the process that plans the big one, MB", _peak_memory(), 1000),
            Goal(f"simulating {sum(map(len, huge.actions)):,} computations, seconds", simulating, 30),
            *_largest_goals(),
            Goal("a search for 64 ranks x 512 microbatches, seconds", seconds(_search), 30),
        ]
    )


def _actions(size: tuple[int, int]) -> int:
    return size[0] * size[1] * CHUNKS * 2


def _time(size: tuple[int, int], make: Callable[[int, int], object]) -> float:
    # A small plan takes milliseconds, so it is made several times.
    repeats = max(1, 20_000 // _actions(size))
    return seconds(lambda: [make(*size) for _ in range(repeats)]) / repeats


def _ours(ranks: int, microbatches: int) -> Plan:
    plan = plan_for(SCHEDULE, ranks=ranks, chunks=CHUNKS, microbatches=microbatches)
    return plan.lower(max_held=MAX_HELD).validate()


def _upstream(ranks: int, microbatches: int) -> object:
    return get_schedule_ops(SCHEDULE, ranks, microbatches, CHUNKS, with_comms=True)


def _peak_memory() -> float:
    """Of a process of its own, which imports no torch."""
    ranks, microbatches = BIG
    code = (
        "import resource; from pipecut.schedule import plan_for; "
        f"plan_for({SCHEDULE!r}, ranks={ranks}, chunks={CHUNKS}, microbatches={microbatches})"
        f".lower(max_held={MAX_HELD}).validate(); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return int(printed) * RSS_UNIT / MEGABYTE


def _largest_goals() -> list[Goal]:
    """Seconds and gigabytes of a process that makes, lowers, proves and simulates a plan for very many ranks."""
    ranks, microbatches = LARGEST
    goals = []
    for name in ("1F1B", SCHEDULE):
        code = (
            "import resource, time; from pipecut.schedule import Costs, plan_for, simulate; "
            f"plan = plan_for({name!r}, ranks={ranks}, microbatches={microbatches}).lower().validate(); "
            "report = simulate(plan, Costs(1, 1.1, 0.8, 0.05)); "
            "report.makespan, report.bubble_rate, report.peak_memory, report.idle; "
            "print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        took, peak = map(float, printed.split())
        what = f"{name}, {ranks:,} ranks x {microbatches:,}"
        goals += [
            Goal(f"{what}: made, lowered, proven, simulated, seconds", took, 60),
            Goal(f"{what}: peak memory, GB", peak * RSS_UNIT / MEGABYTE / 1024, 8),
        ]
    return goals


def _search() -> None:
    costs = Costs(10.4, 10.2, 7.7, 0.4, memory_backward_input=-0.57, memory_backward_weight=-0.43)
    auto_schedule(ranks=64, microbatches=512, costs=costs, memory_limit=128)
