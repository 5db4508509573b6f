"""Result of a verification: every difference, the worst first, and a table of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import PipeError

What = Literal["loss", "output", "gradient", "gradient norm", "input gradient", "buffer"]

MISSING = "missing: the uncut model has one"
EXTRA = "extra: the uncut model has none"
ROWS = 8  # of the table, if all is well
_WRONG_ROWS = 24  # if it is not
_HEAD = ("", "the worst first", "stage", "off by", "relative", "allowed")


class VerificationError(PipeError):
    """The stages do not compute what the model computes. `verification` has every difference."""

    def __init__(self, verification: Verification) -> None:
        super().__init__(f"the stages do not compute what the model computes.\n{verification}")
        self.verification = verification

    def __reduce__(self) -> tuple[type[VerificationError], tuple[Verification]]:
        return type(self), (self.verification,)


@dataclass(frozen=True)
class Difference:
    """Difference of one value between the stages and the uncut model.

    `off_by` is the largest difference of an element, `magnitude` the number that it is relative to, `allowed` the
    limit. `fault` is set where there is nothing to subtract: the two have different shapes, or one is missing.
    """

    what: What
    name: str
    off_by: float = 0.0
    magnitude: float = 0.0
    allowed: float = 0.0
    stage: int | None = None
    fault: str = ""
    values: tuple[float, float] | None = None  # of a number: cut, uncut

    @property
    def ok(self) -> bool:
        """True if the difference is allowed."""
        return not self.fault and self.off_by <= self.allowed

    @property
    def relative(self) -> float:
        """Return the difference as a part of the magnitude."""
        return _ratio(self.off_by, self.magnitude)

    @property
    def badness(self) -> float:
        """Return the difference as a multiple of the allowed one."""
        return math.inf if self.fault else _ratio(self.off_by, self.allowed)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0


@dataclass(frozen=True, repr=False)
class Verification:
    """Result of `verify`. Print it for a table; `differences` has them all, the worst first."""

    title: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    tolerance: str

    @property
    def ok(self) -> bool:
        """True if everything is as in the uncut model."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """Differences that are not allowed."""
        return tuple(difference for difference in self.differences if not difference.ok)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of parameters that have a gradient in the uncut model only."""
        return tuple(difference.name for difference in self.differences if difference.fault == MISSING)

    @property
    def extra(self) -> tuple[str, ...]:
        """Names of parameters that have a gradient in the stages only."""
        return tuple(difference.name for difference in self.differences if difference.fault == EXTRA)

    def raise_if_wrong(self) -> None:
        """Raise a VerificationError with the table, unless all is well."""
        if not self.ok:
            raise VerificationError(self)

    def __str__(self) -> str:
        total, wrong = len(self.differences), self.wrong
        verdict = f"all {total} as in the uncut model" if self.ok else f"{len(wrong)} of {total} differ"
        shown = self.differences[:ROWS] if self.ok else wrong[:_WRONG_ROWS]
        left = (total if self.ok else len(wrong)) - len(shown)
        return "\n".join(
            [
                f"{self.title}: {verdict}",
                *map(_number, sorted(filter(_is_number, self.differences), key=lambda number: number.what != "loss")),
                *_table(shown),
                *([f"  and {left} more, none of them worse"] if left else []),
                f"tolerance: {self.tolerance}",
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__


def by_badness(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Sort differences, the worst first; of equals the one that was found first."""
    return tuple(sorted(differences, key=lambda difference: -difference.badness))


def _is_number(difference: Difference) -> bool:
    return difference.values is not None


def _number(difference: Difference) -> str:
    assert difference.values is not None
    return "{}: {:.7g}, uncut {:.7g}".format(difference.what, *difference.values)


def _table(differences: Sequence[Difference]) -> list[str]:
    rows = [_HEAD, *map(_cells, differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row, difference in zip(rows, (None, *differences), strict=True):
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        if difference is not None and difference.fault:
            right = [right[0], difference.fault]
        lines.append("  ".join(["", *left, *right]).rstrip())
    return lines


def _cells(difference: Difference) -> tuple[str, ...]:
    stage = "" if difference.stage is None else str(difference.stage)
    if difference.fault:
        return difference.what, difference.name, stage, "", "", ""
    allowed = _ratio(difference.allowed, difference.magnitude)
    numbers = (difference.off_by, difference.relative, allowed)
    return difference.what, difference.name, stage, *(f"{number:.2g}" for number in numbers)
