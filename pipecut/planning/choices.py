"""What can be chosen: a schedule, the size of microbatches, whether activations are computed again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import InputError, PlanError
from ..schedule import FAMILIES, Op, Plan, plan_for

# Schedules that train; which of them fit is found out.
TRAINING = tuple(name for name in FAMILIES if name != "ForwardOnly")
_MOST_SIZES = 6
_NEAR = 0.25  # numbers of microbatches that differ by this much are as good
_SMALL_WASTE = 0.05  # an uneven division that is worse than an even one by so little is as good


@dataclass(frozen=True)
class Choice:
    """One way to run a batch."""

    schedule: str
    microbatch: int  # samples
    microbatches: int
    recompute: bool

    def plan(self, ranks: int) -> Plan:
        """The plan of the schedule."""
        return plan_for(self.schedule, ranks=ranks, microbatches=self.microbatches)


def all_choices(
    schedules: Sequence[str], counts: Sequence[int], batch: int, recompute: Sequence[bool]
) -> Iterator[Choice]:
    """Every combination; where the batch is not divided evenly, a microbatch counts as the largest of them."""
    for count in counts:
        for name in schedules:
            for again in recompute:
                yield Choice(name, largest_microbatch(batch, count), count, again)


def largest_microbatch(batch: int, count: int) -> int:
    """The samples of the largest of so many microbatches; the smallest has one less, if any has.

    >>> largest_microbatch(10, 4)
    3
    """
    return -(-batch // count)


def microbatch_counts(batch: int, ranks: int) -> list[int]:
    """Numbers of microbatches to try: the ranks, twice that, four times that... up to the batch.

    Near each of them one is taken that divides the batch about evenly, and that is a multiple of the ranks if possible.

    >>> microbatch_counts(64, 4)
    [4, 8, 16, 32, 64]
    >>> microbatch_counts(251, 4)
    [4, 8, 16, 64, 128, 251]
    """
    doubled = itertools.takewhile(lambda count: count < batch, (ranks * 2**power for power in itertools.count()))
    found = sorted({_near(count, batch, ranks) for count in doubled} | {batch})
    if len(found) <= _MOST_SIZES:
        return found
    steps = [round(nth * (len(found) - 1) / (_MOST_SIZES - 1)) for nth in range(_MOST_SIZES)]
    return [found[step] for step in steps]


def _near(count: int, batch: int, ranks: int) -> int:
    """The number of microbatches near one with the least waste; waste is what smaller microbatches leave idle."""

    def quality(other: int) -> tuple[float, bool, int]:
        waste = other * largest_microbatch(batch, other) / batch - 1
        return (max(waste, _SMALL_WASTE), other % ranks > 0, abs(other - count))

    near = range(max(ranks, math.ceil(count * (1 - _NEAR))), min(batch, math.floor(count * (1 + _NEAR))) + 1)
    return min(near, key=quality)


def in_flight(plan: Plan) -> list[float]:
    """How many microbatches each stage holds at the most: from a forward until the backward that frees it."""
    most = [0.0] * plan.stages
    held = [0] * plan.stages
    for row in plan.actions:
        for action in row:
            for leaf in () if action is None else action.leaves:
                change = _HELD.get(leaf.op, 0)
                held[leaf.stage] += change
                most[leaf.stage] = max(most[leaf.stage], held[leaf.stage])
    return most


# The balance counts a microbatch as a whole until its backward is done; what is left between the halves is finer.
_HELD = {Op.FORWARD: 1, Op.FULL_BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}


def check_request(ranks: int, batch: int, recompute: object, time_budget: object, speeds: object, cost: object) -> None:
    """Refuse what cannot be planned for."""
    if cost not in ("analytic", "measured"):
        raise InputError(f"cost must be 'analytic' or 'measured', got {cost!r}")
    if recompute not in (True, False, "auto"):
        raise InputError(f"recompute must be True, False or 'auto', got {recompute!r}")
    if not isinstance(time_budget, int | float) or not 0 <= time_budget < float("inf"):
        raise InputError(f"time_budget must be seconds, 0 or more, got {time_budget!r}")
    if speeds is not None and not (
        isinstance(speeds, Sequence) and all(isinstance(each, int | float) for each in speeds)
    ):
        raise InputError(f"speeds must be a list with a number for each rank, got {speeds!r}")
    for name, value in (("ranks", ranks), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    if batch < ranks:
        raise InputError(
            f"a batch of {batch} has fewer samples than there are ranks ({ranks}): ranks would have nothing to do; use "
            "a larger batch, or fewer ranks"
        )


def known_schedules(names: Sequence[str] | None) -> tuple[str, ...]:
    """The schedules to try."""
    if names is None:
        return TRAINING
    if isinstance(names, str) or not names:
        raise PlanError(f"schedules={names!r}: give a list of names, such as ['1F1B', 'ZB-H1'].")
    unknown = [name for name in names if name not in TRAINING]
    if unknown:
        raise PlanError(f"There is no schedule '{unknown[0]}' that trains: choose among {', '.join(TRAINING)}.")
    return tuple(names)
