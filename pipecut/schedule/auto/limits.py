"""Limits on what the ranks may hold: as the user gives them, and the least that can work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

from ...errors import PlanError
from ..amount import amount

MemoryLimit = float | Sequence[float] | None
TOLERANCE = 1e-9  # of a limit: sums of many amounts are not exact


def limits_of(memory_limit: MemoryLimit, ranks: int) -> tuple[float, ...]:
    """One limit for each rank; without any, there is none, and inf is none for one rank.

    >>> limits_of(3, ranks=2), limits_of([3, math.inf], ranks=2), limits_of(None, ranks=2)
    ((3.0, 3.0), (3.0, inf), (inf, inf))
    """
    if memory_limit is None:
        return (math.inf,) * ranks
    if not isinstance(memory_limit, Sequence) or isinstance(memory_limit, str | bytes):
        return (amount("memory_limit", memory_limit, endless=True),) * ranks
    if len(memory_limit) != ranks:
        raise PlanError(f"memory_limit has {len(memory_limit)} numbers for {ranks} ranks: give one for each, or one.")
    return tuple(amount(f"memory_limit[{rank}]", each, endless=True) for rank, each in enumerate(memory_limit))


def ceiling(limit: float) -> float:
    """What counts as within a limit."""
    return limit + TOLERANCE * limit


@dataclass(frozen=True)
class Excess:
    """A schedule that does not fit, and what each rank would hold."""

    name: str
    limits: tuple[float, ...]
    peaks: tuple[float, ...]

    @property
    def missing(self) -> float:
        """By how much the worst rank is over its limit."""
        return self._over[self.worst]

    @property
    def worst(self) -> int:
        """The rank that is furthest over its limit."""
        return self._over.index(max(self._over))

    @property
    def _over(self) -> list[float]:
        return [peak - limit for peak, limit in zip(self.peaks, self.limits, strict=True)]

    def __str__(self) -> str:
        return f"rank {self.worst} would hold {self.peaks[self.worst]:.6g}, its limit is {self.limits[self.worst]:.6g}"


def nothing_fits(every: Sequence[Excess]) -> PlanError:
    """The error if none of the known schedules fits, nor one microbatch at a time, with the least that would do."""
    least = min(every, key=lambda each: (each.missing, sum(each.peaks)))
    same = min(least.limits) == max(least.limits)
    # A rank without a limit keeps none.
    enough = [
        limit if math.isinf(limit) else _rounded_up(peak) for peak, limit in zip(least.peaks, least.limits, strict=True)
    ]
    rank = least.worst
    remedy = (
        f"the least memory_limit that would do is {_rounded_up(max(least.peaks)):.6g}"
        if same
        else f"the least limits that would do are {enough}"
    )
    return PlanError(
        f"No plan fits the memory limit: rank {rank} may hold {least.limits[rank]:.6g}, and {least.name} needs "
        f"{least.peaks[rank]:.6g} there; {remedy}. Raise it, or make the microbatches smaller."
    )


def _rounded_up(value: float) -> float:
    """Six digits that are not less: a limit that is named must do.

    >>> _rounded_up(8589934592.0), _rounded_up(0.1 + 0.2)
    (8589940000.0, 0.3)
    """
    near = float(f"{value:.6g}")
    if value <= ceiling(near):
        return near
    return float(Context(prec=6, rounding=ROUND_CEILING).plus(Decimal(value)))
