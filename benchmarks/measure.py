"""Timing in turn, medians and ratios of rounds, and how they are printed."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

console = Console(width=120)
clock = time.process_time
DEADLINE = "PIPECUT_BENCHMARK_DEADLINE"  # the variable with the time at which a benchmark is ended
VERDICTS = {True: "[green]met[/]", False: "[bold red]missed[/]"}
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def time_left() -> float:
    """Return the seconds until this benchmark is ended; infinite if nobody ends it."""
    return float(os.environ.get(DEADLINE, math.inf)) - time.time()


def in_turn(sides: Mapping[Name, Callable[[], Result]], rounds: int, what: str) -> dict[Name, list[Result]]:
    """Call each side once a round, each round with another one first, after a round of warm-up that does not count.

    There are fewer rounds, but at least one, if more would take over half of the time that is left.
    """
    begin, left = time.monotonic(), time_left()
    for side in sides.values():
        side()
    rounds = max(1, int(min(rounds, left / 2 / max(time.monotonic() - begin, 1e-9))))
    names = list(sides)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    with _own_garbage_only():
        for nth in track(range(rounds), what, console=console, transient=True, disable=not console.is_terminal):
            first = nth % len(names)
            for name in names[first:] + names[:first]:
                gc.collect()
                results[name].append(sides[name]())
    return results


@contextlib.contextmanager
def _own_garbage_only() -> Iterator[None]:
    """Keep the garbage collector away from objects that exist already: it would run on either side by chance."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds(run: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = clock()
    run()
    return clock() - begin


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio within a round, where both met the same conditions; of that the median."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Goal:
    """A number that should not be above a limit; the reason is that for which it may be missed."""

    what: str
    value: float
    limit: float
    reason: str = ""

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


def show_goals(goals: Iterable[Goal]) -> list[Goal]:
    """Print what was aimed at and what came out, and return it."""
    goals = list(goals)
    rows = [[goal.what, f"{goal.value:.3f}", f"{goal.limit:g}", VERDICTS[goal.is_met]] for goal in goals]
    show_table("goals", ["goal", "measured", "at most", ""], rows)
    return goals


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows of text, the first column to the left and the rest to the right."""
    table = Table(title=title, title_justify="left")
    for nth, column in enumerate(columns):
        table.add_column(column, justify="right" if nth else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def milliseconds(times: Sequence[float]) -> str:
    """The median as text."""
    return f"{1000 * statistics.median(times):,.1f}"
