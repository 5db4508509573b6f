"""The choices of a plan: a schedule, the size of microbatches, and recomputation of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError, PlanError
from ..pipe_ir import TracedModel
from ..schedule import FAMILIES, Op, Plan, plan_for
from ..split import changed_state
from .microbatches import largest_microbatch

# Schedules that train; the search finds out which of them fit.
TRAINING = tuple(family.name for family in FAMILIES.values() if family.training)


@dataclass(frozen=True)
class Choice:
    """One way to run a batch."""

    schedule: str
    microbatch: int  # samples
    microbatches: int
    recompute: bool

    def plan(self, ranks: int) -> Plan:
        """Return the plan of the schedule."""
        return plan_for(self.schedule, ranks=ranks, microbatches=self.microbatches)


def all_choices(
    schedules: Sequence[str], counts: Sequence[int], batch: int, recompute: Sequence[bool]
) -> Iterator[Choice]:
    """Yield every combination; if the batch is not divided evenly, a microbatch counts as the largest of them."""
    for count in counts:
        for name in schedules:
            for again in recompute:
                yield Choice(name, largest_microbatch(batch, count), count, again)


def in_flight(plan: Plan) -> list[float]:
    """Return the most microbatches that each stage holds: from a forward until the backward that frees it."""
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


def recompute_options(traced: TracedModel, recompute: bool | Literal["auto"]) -> tuple[bool, ...]:
    """Return the values of recompute to try: not True if a forward changes buffers, which it would change twice."""
    changed = sorted(changed_state(traced))
    if changed and recompute is True:
        raise InputError(
            f"recompute=True runs forwards twice, and this model's forward changes {changed[0]!r}: it would be changed "
            "twice; put the model in evaluation mode, or leave recompute at 'auto'"
        )
    if recompute == "auto":
        return (False,) if changed else (False, True)
    return (bool(recompute),)


def check_request(ranks: int, batch: int, recompute: object, time_budget: object, speeds: object, cost: object) -> None:
    """Raise InputError for options that cannot be planned for."""
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
    """Return the schedules to try."""
    if names is None:
        return TRAINING
    if isinstance(names, str) or not names:
        raise PlanError(f"schedules={names!r}: give a list of names, such as ['1F1B', 'ZB-H1'].")
    unknown = [name for name in names if name not in TRAINING]
    if unknown:
        raise PlanError(f"There is no schedule '{unknown[0]}' that trains: choose among {', '.join(TRAINING)}.")
    return tuple(names)
