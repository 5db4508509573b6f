"""Schedules by name: the decorator that registers a schedule family, and `plan_for`, which makes its plans.

A schedule family is one file of `families/`. Everything that asks for a schedule by its name reads this registry:
`plan_for`, the search, the planner, and the classes such as `Schedule1F1B`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import PlanError
from .action import MOST_NUMBERS, MOST_STAGES, Rows
from .plan import Plan, collector_paused
from .rules import Dataflow, Placement, check_positive

_MakeRows = TypeVar("_MakeRows", bound=Callable[[Placement, int], Rows])


@dataclass(frozen=True)
class Family:
    """A registered schedule."""

    name: str
    make_rows: Callable[[Placement, int], Rows] = field(repr=False)
    place: Callable[[int, int], Placement] = field(repr=False)
    chunks: int  # stages per rank
    any_chunks: bool  # then `chunks` is only the default
    training: bool  # False: forward only
    forbids_compiled: bool  # it gains nothing with a stage that is compiled as a whole
    class_name: str

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.make_rows.__doc__ or self.name).strip().partition("\n")[0]

    def plan(self, ranks: int, microbatches: int, chunks: int | None = None) -> Plan:
        """Make the plan for these sizes."""
        chunks = self.chunks if chunks is None else chunks
        check_positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
        if chunks != self.chunks and not self.any_chunks:
            raise _wrong_chunks(self, chunks)
        for what, count, most in (
            ("microbatches", microbatches, MOST_NUMBERS),
            ("stages", ranks * chunks, MOST_STAGES),
        ):
            if count >= most:
                raise PlanError(f"A plan has fewer than {most:,} {what}, and {count:,} are asked for: give fewer.")
        placement = self.place(ranks, chunks)
        rows = self.make_rows(placement, microbatches)
        return Plan(self.name, placement, microbatches, rows, Dataflow.chain(placement.stages), self.training)


FAMILIES: dict[str, Family] = {}


def schedule(
    name: str,
    *,
    placement: Callable[[int, int], Placement] = Placement.loop,
    chunks: int = 1,
    any_chunks: bool = False,
    training: bool = True,
    forbids_compiled: bool = False,
    class_name: str | None = None,
) -> Callable[[_MakeRows], _MakeRows]:
    """Register a function from a placement and a number of microbatches to the actions of every rank.

        @schedule("Mine")
        def mine(placement: Placement, microbatches: int) -> Rows:
            "Run one microbatch after the other."
            return tuple(_row(rank, microbatches) for rank in range(placement.ranks))

    `placement` puts the stages on the ranks: `Placement.loop`, `Placement.v`, or any function of the numbers of ranks
    and chunks. `chunks` is the number of stages per rank; with `any_chunks` it is only the default. The class of the
    schedule is named after it, here ScheduleMine, and described by the first line of the docstring. With
    `forbids_compiled` it takes no stage that is compiled as a whole, with which it would gain nothing.
    """
    check_positive(chunks=chunks)
    class_name = class_name or "Schedule" + re.sub(r"\W", "", name)

    def register(make_rows: _MakeRows) -> _MakeRows:
        known = FAMILIES.get(_names().get(_plain(name), name))
        if known is not None and _origin(known.make_rows) != _origin(make_rows):  # the same one may come again
            raise PlanError(f"There is a schedule named '{known.name}' already: give '{name}' another name.")
        FAMILIES[name] = Family(name, make_rows, placement, chunks, any_chunks, training, forbids_compiled, class_name)
        return make_rows

    return register


def schedule_names() -> tuple[str, ...]:
    """Return the names that `plan_for` knows.

    >>> "1F1B" in schedule_names()
    True
    """
    return tuple(FAMILIES)


@collector_paused
def plan_for(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> Plan:
    """Make the plan of a schedule. `chunks` is the number of stages per rank, by default that of the schedule.

    Names are taken in any case, and as those of classes: "1F1B" or "Schedule1F1B".

    >>> print(plan_for("1F1B", ranks=2, microbatches=3).grid())
    rank 0 │ 0F0 0F1 ·   0B0 0F2 0B1 ·   0B2
    rank 1 │ ·   1F0 1B0 1F1 1B1 1F2 1B2 ·
    """
    return FAMILIES[known_name(name)].plan(ranks, microbatches, chunks)


def known_name(name: str) -> str:
    """Return a schedule's name as it was registered, however it is spelled.

    >>> known_name("schedule_zbh1")
    'ZB-H1'
    """
    known = _names().get(_plain(name)) if isinstance(name, str) else None
    if known is None:
        raise _unknown(name)
    return known


def _names() -> dict[str, str]:
    return {_plain(name): name for name in FAMILIES}


def _plain(name: str) -> str:
    """Drop from a name what may be written in several ways: case, hyphens, and the "Schedule" of a class."""
    return re.sub(r"^schedule|[-_ ]", "", name.strip().lower())


def _origin(function: Callable[..., object]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _unknown(name: object) -> PlanError:
    plain, names = _plain(str(name)), _names()
    alike = [known for short, known in names.items() if plain and short.startswith(plain)]
    alike = alike or [names[short] for short in difflib.get_close_matches(plain, names, n=3, cutoff=0.6)]
    near = f" Did you mean {' or '.join(map(repr, alike))}?" if alike else ""
    return PlanError(f"Unknown schedule name {name!r}.{near} Known are {', '.join(FAMILIES)}.")


def _wrong_chunks(family: Family, chunks: int) -> PlanError:
    others = ", ".join(other.name for other in FAMILIES.values() if other.any_chunks)
    return PlanError(
        f"chunks={chunks} does not fit {family.name}, which has {family.chunks} on each rank: leave chunks out, or "
        f"take a schedule with any number of chunks ({others})."
    )
