"""Placements of stages on ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import PlanError


@dataclass(frozen=True)
class Placement:
    """The rank of every stage.

    >>> Placement.loop(ranks=2, chunks=2).rank_of
    (0, 1, 0, 1)
    >>> Placement.v(ranks=2).rank_of
    (0, 1, 1, 0)
    >>> Placement.explicit({0: 0, 1: 0, 2: 1, 3: 1, 4: 0}).stages_of
    ((0, 1, 4), (2, 3))
    """

    rank_of: tuple[int, ...]  # by stage

    def __post_init__(self) -> None:
        if not self.rank_of or min(self.rank_of) < 0:
            raise PlanError(
                f"A placement gives every stage a rank, 0 or more, and has at least one stage; got {self.rank_of}."
            )

    @classmethod
    def loop(cls, ranks: int, chunks: int = 1) -> Placement:
        """Put stage s on rank s mod ranks."""
        check_positive(ranks=ranks, chunks=chunks)
        return cls(tuple(range(ranks)) * chunks)

    @classmethod
    def v(cls, ranks: int, chunks: int = 2) -> Placement:
        """Go down the ranks and up again: with 2 chunks, the first and the last stage are on rank 0."""
        check_positive(ranks=ranks, chunks=chunks)
        down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
        return cls(sum((down if chunk % 2 == 0 else up for chunk in range(chunks)), ()))

    @classmethod
    def explicit(cls, rank_of: Mapping[int, int] | Sequence[int]) -> Placement:
        """Take any map of stages to ranks; stages and ranks are numbered from 0 without gaps."""
        numbers = [*rank_of, *rank_of.values()] if isinstance(rank_of, Mapping) else list(rank_of)
        wrong = [number for number in numbers if not isinstance(number, int) or isinstance(number, bool)]
        if wrong:
            raise PlanError(
                f"The placement has {wrong[0]!r}: stages and ranks are integers, as in {{0: 0, 1: 1, 2: 0}}."
            )
        by_stage = dict(rank_of) if isinstance(rank_of, Mapping) else dict(enumerate(rank_of))
        _check_no_gaps("stage", by_stage)
        _check_no_gaps("rank", by_stage.values())
        return cls(tuple(by_stage[stage] for stage in range(len(by_stage))))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.rank_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))


def _check_no_gaps(what: str, numbers: Collection[int]) -> None:
    missing = first_missing(numbers)
    has_gap = not numbers or missing < max(numbers)
    if has_gap or min(numbers) < 0:
        wrong = f"no {what} {missing}" if has_gap else f"{what} {min(numbers)}"
        raise PlanError(f"The placement has {wrong}: number the {what}s 0, 1, 2... without gaps.")


def first_missing(numbers: Collection[int]) -> int:
    """Return the smallest integer from 0 up that is missing: the next one, if there is no gap.

    >>> first_missing([0, 1, 5]), first_missing([2, 0, 1])
    (2, 3)
    """
    there = set(numbers)
    return next(number for number in range(len(there) + 1) if number not in there)


def check_positive(**sizes: int) -> None:
    """Raise unless the sizes are integers from 1 up."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PlanError(f"{name}={size!r}: give an integer number of {name}, 1 or more.")
