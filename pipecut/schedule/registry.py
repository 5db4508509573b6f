"""Schedules by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import PlanError
from . import families
from .placement import positive
from .plan import Plan
from .walk import collector_paused


@dataclass(frozen=True)
class Family:
    """How a schedule is made, and how many chunks (stages a rank) it has."""

    make: Callable[..., Plan]
    chunks: int
    any_chunks: bool = False  # then `chunks` is only the default


FAMILIES = {
    "GPipe": Family(families.gpipe, chunks=1),
    "1F1B": Family(families.one_f_one_b, chunks=1),
    "Interleaved1F1B": Family(families.interleaved_one_f_one_b, chunks=2, any_chunks=True),
    "LoopedBFS": Family(families.looped_bfs, chunks=2, any_chunks=True),
    "InterleavedZeroBubble": Family(families.interleaved_zero_bubble, chunks=2, any_chunks=True),
    "ZBVZeroBubble": Family(families.zero_bubble_v, chunks=2),
    "DualPipeV": Family(families.dualpipe_v, chunks=2),
    "ForwardOnly": Family(families.forward_only, chunks=1, any_chunks=True),
    "ZB-H1": Family(families.zero_bubble_h1, chunks=1),
    "ZB-H2": Family(families.zero_bubble_h2, chunks=1),
    "V-Half": Family(families.v_half, chunks=2),
    "V-Min": Family(families.v_min, chunks=2),
}


def _plain(name: str) -> str:
    """A name without what may be written in several ways: case, hyphens, and the "Schedule" of a class."""
    return re.sub(r"^schedule|[-_ ]", "", name.strip().lower())


_NAMES = {_plain(name): name for name in FAMILIES}


def schedule_names() -> tuple[str, ...]:
    """The names that `plan_for` knows.

    >>> "1F1B" in schedule_names()
    True
    """
    return tuple(FAMILIES)


@collector_paused
def plan_for(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> Plan:
    """The plan of a schedule. `chunks` is the number of stages on each rank, by default what the schedule is made for.

    Names are taken in any case, and as those of classes: "1F1B" or "Schedule1F1B".

    >>> print(plan_for("1F1B", ranks=2, microbatches=3).grid())
    rank 0 │ 0F0 0F1 ·   0B0 0F2 0B1 ·   0B2
    rank 1 │ ·   1F0 1B0 1F1 1B1 1F2 1B2 ·
    """
    known = known_name(name)
    family = FAMILIES[known]
    if chunks is None:
        chunks = family.chunks
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if family.any_chunks:
        return family.make(ranks, microbatches, chunks)
    if chunks != family.chunks:
        raise _wrong_chunks(known, family, chunks)
    return family.make(ranks, microbatches)


def known_name(name: str, others: Iterable[str] = ()) -> str:
    """A schedule's name as it is written here, however it is spelled; `others` are names that the caller knows too.

    >>> known_name("schedule_zbh1")
    'ZB-H1'
    """
    known = _NAMES.get(_plain(name)) if isinstance(name, str) else None
    if known is None:
        raise _unknown(name, others)
    return known


def _unknown(name: object, others: Iterable[str]) -> PlanError:
    plain = _plain(str(name))
    alike = [known for short, known in _NAMES.items() if plain and short.startswith(plain)]
    alike = alike or [_NAMES[short] for short in difflib.get_close_matches(plain, _NAMES, n=3, cutoff=0.6)]
    near = f" Did you mean {' or '.join(map(repr, alike))}?" if alike else ""
    return PlanError(f"Unknown schedule name {name!r}.{near} Known are {', '.join((*FAMILIES, *others))}.")


def _wrong_chunks(name: str, family: Family, chunks: int) -> PlanError:
    others = ", ".join(other for other, its in FAMILIES.items() if its.any_chunks)
    return PlanError(
        f"chunks={chunks} does not fit {name}, which has {family.chunks} on each rank: leave chunks out, or take a "
        f"schedule with any number of chunks ({others})."
    )
