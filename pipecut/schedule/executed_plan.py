"""Whether what was executed is the plan that it is laid beside: the same actions on each rank, in the same order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..errors import PlanError
from .action import Action
from .report import Report
from .timeline import Span

NAMED = 4  # actions that an error lists


def check_executed(report: Report, seen: Iterable[Span]) -> None:
    """Refuse computations that are not those of the plan, on the ranks of which there are any."""
    rows: dict[int, list[Action]] = {}
    for span in sorted((span for span in seen if span.action.is_compute), key=lambda each: each.start):
        rows.setdefault(span.rank, []).append(span.action)
    planned = report.timeline.by_rank
    for rank, executed in sorted(rows.items()):
        foretold = planned[rank] if rank < len(planned) else ()
        # Sums of ties are compared where they are, and a timeline of computations alone is whole without them.
        expected = [span.action for span in foretold if span.action.is_compute]
        fault = _fault(rank, f"the plan '{report.plan.name}'", expected, executed)
        if fault is not None:
            raise PlanError(fault)


def _fault(rank: int, plan: str, expected: list[Action], executed: list[Action]) -> str | None:
    known, times = set(expected), Counter(executed)
    strange = [action for action in executed if action not in known]
    if strange:
        return f"{strange[0]} was executed and is not in {plan} on rank {rank}: compare a run of it."
    repeated = [action for action, count in times.items() if count > 1]
    if repeated:
        return f"{repeated[0]} was executed {times[repeated[0]]} times on rank {rank}: compare one step at a time."
    missing = [action for action in expected if action not in times]
    if missing:
        named = ", ".join(map(str, missing[:NAMED])) + (", ..." if len(missing) > NAMED else "")
        return (
            f"Rank {rank} did not execute {named} of {plan} ({len(missing)} of its {len(expected)} actions): compare a "
            "whole step of it, with all its microbatches and backwards."
        )
    for place, (wanted, done) in enumerate(zip(expected, executed, strict=True)):
        if wanted != done:
            return (
                f"Rank {rank} executed {done} as number {place} where {plan} has {wanted}: compare a run in its "
                "order. The first step of a schedule without a loss_fn takes a microbatch ahead, to see whether there "
                "is a loss: trace a later one."
            )
    return None
