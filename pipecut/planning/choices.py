"""What can be chosen: a schedule, the size of microbatches, whether activations are computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import InputError, PlanError
from ..schedule.plan import Plan
from ..schedule.registry import FAMILIES, plan_for

# Schedules that train; which of them fit is found out.
TRAINING = tuple(name for name in FAMILIES if name != "ForwardOnly")
MOST_SIZES = 6


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
    schedules: Sequence[str], sizes: Sequence[int], batch: int, recompute: Sequence[bool]
) -> Iterator[Choice]:
    """Every combination."""
    for size in sizes:
        for name in schedules:
            for again in recompute:
                yield Choice(name, size, -(-batch // size), again)


def microbatch_sizes(batch: int, ranks: int) -> list[int]:
    """Sizes to try: divisors of the batch that give every rank something to do, spread over their range.

    >>> microbatch_sizes(64, 4)
    [1, 2, 4, 8, 16]
    """
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    useful = [size for size in divisors if batch // size >= ranks] or [1]
    if len(useful) <= MOST_SIZES:
        return useful
    steps = [round(nth * (len(useful) - 1) / (MOST_SIZES - 1)) for nth in range(MOST_SIZES)]
    return [useful[step] for step in steps]


def in_flight(plan: Plan) -> list[float]:
    """How many microbatches each stage holds at the most: from a forward until the backward that frees it."""
    most = [0.0] * plan.stages
    held = [0] * plan.stages
    for row in plan.actions:
        for action in row:
            for leaf in () if action is None else action.leaves:
                change = CHANGES.get(leaf.op.name, 0)
                held[leaf.stage] += change
                most[leaf.stage] = max(most[leaf.stage], held[leaf.stage])
    return most


CHANGES = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}


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
