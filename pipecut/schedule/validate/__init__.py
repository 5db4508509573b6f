"""The proof that a plan can run: complete, in order, every message met, no deadlock. Every fault at once."""

from __future__ import annotations

from ...errors import PlanError
from ...text import counted
from ..plan import Plan, collector_paused
from ..plan_text import marked_grid
from .deadlock import deadlock_faults
from .order import Fault, PlanReading, order_faults, sharding_faults

__all__ = ["Fault", "find_faults", "validate"]

_SHOWN = 20  # faults in one message; all of them are in the error's `faults`


@collector_paused
def find_faults(plan: Plan) -> list[Fault]:
    """Return everything that keeps a plan from running, causes first, by rank and slot; empty if it can run."""
    reading = PlanReading(plan)
    faults = order_faults(plan, reading)
    faults += sharding_faults(plan, reading)
    faults += deadlock_faults(plan, reading)
    return sorted(dict.fromkeys(faults), key=lambda fault: (not fault.cause, fault.rank, fault.slot))


def validate(plan: Plan) -> None:
    """Raise a PlanError that lists every fault, with the grid around the first, unless the plan can run."""
    faults = find_faults(plan)
    if not faults:
        return
    lines = [f"The plan '{plan.name}' cannot run: {counted(len(faults), 'fault')}."]
    lines += [f"  {fault}" for fault in faults[:_SHOWN]]
    if len(faults) > _SHOWN:
        lines.append(f"  ... and {len(faults) - _SHOWN} more, all in the error's `faults`.")
    first = faults[0]
    lines.append(marked_grid(plan.actions, first.rank, first.slot, first.action))
    raise PlanError("\n".join(lines), faults)
