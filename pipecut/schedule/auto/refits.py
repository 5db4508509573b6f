"""Which candidates get their weight gradients put anew, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .budget import Budget
from .candidate import Candidate, accepted, merit
from .problem import FULL, INPUT, WEIGHT, Problem, Row
from .refit import Putting, refitted
from .timing import Clock

UNLIMITED = 1 << 30


def refits(clock: Clock, candidates: Sequence[Candidate], objective: str, budget: Budget) -> Iterator[Candidate]:
    """The best way that was found to put the weight gradients of each candidate, the best of which comes first.

    Left out are those that cannot become the best, wherever their weight gradients are, and orders that come again.
    """
    best = candidates[0].merit(objective) if candidates else (0.0, 0.0)
    done: list[list[Row]] = []
    for candidate in candidates:
        if budget.is_over():
            return
        rows = without_weights(clock.problem, candidate.rows)
        least = clock.times(rows)
        assert least is not None  # with weight gradients between them they could be gone through
        if merit(least, objective) >= best or rows in done:
            continue
        done.append(rows)
        name = f"{candidate.name}, refitted"
        puttings = _puttings(clock.problem.ranks)
        made = (accepted(name, clock, refitted(clock, rows, putting)) for putting in puttings)
        fitting = [each for each in made if each is not None]
        if fitting:
            refit = min(fitting, key=lambda each: each.merit(objective))
            best = min(best, refit.merit(objective))
            yield refit


def without_weights(problem: Problem, rows: Sequence[Row]) -> list[Row]:
    """Forwards and input gradients, which stand in the place of full backwards."""
    block = problem.stages * problem.microbatches
    shift = (FULL - INPUT) * block
    return [
        [number - shift if number >= FULL * block else number for number in row if number // block != WEIGHT]
        for row in rows
    ]


def _puttings(ranks: int) -> Iterator[Putting]:
    """Nothing depends on the gradients of the first rank: it may take its time. The others had better not."""
    unlimited = (UNLIMITED,) * ranks
    yield Putting((1.0, *(0.0,) * (ranks - 1)), unlimited)
    yield Putting((0.0,) * ranks, unlimited)
    yield Putting((0.5,) * ranks, unlimited)
    yield Putting((1.0,) * ranks, tuple(range(ranks)))
