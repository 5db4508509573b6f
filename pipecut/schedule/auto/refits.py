"""Which candidates get their weight gradients put anew, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .budget import Budget
from .candidate import Candidate, accepted
from .problem import FULL, INPUT, Problem, Row
from .refit import Putting, refitted
from .timing import Clock

UNLIMITED = 1 << 30


def refits(clock: Clock, candidates: Iterable[Candidate], objective: str, budget: Budget) -> Iterator[Candidate]:
    """The best way that was found to put the weight gradients of each candidate, if there is one within the limits."""
    for candidate in candidates:
        rows = split_backwards(clock.problem, candidate.rows)
        name = f"{candidate.name}, refitted"
        puttings = _puttings(clock.problem.ranks)
        made = (accepted(name, clock, refitted(clock, rows, putting)) for putting in puttings)
        fitting = [each for each in made if each is not None]
        if fitting:
            yield min(fitting, key=lambda each: each.merit(objective))
        if budget.is_over():
            return


def split_backwards(problem: Problem, rows: Sequence[Row]) -> list[Row]:
    """Input gradients in the place of full backwards."""
    block = problem.stages * problem.microbatches
    return [[number - (FULL - INPUT) * block if number >= FULL * block else number for number in row] for row in rows]


def _puttings(ranks: int) -> Iterator[Putting]:
    """Nothing depends on the gradients of the first rank: it may take its time. The others had better not."""
    unlimited = (UNLIMITED,) * ranks
    yield Putting((1.0, *(0.0,) * (ranks - 1)), unlimited)
    yield Putting((0.0,) * ranks, unlimited)
    yield Putting((0.5,) * ranks, unlimited)
    yield Putting((1.0,) * ranks, tuple(range(ranks)))
