"""Comparison of predicted and executed times: by kind of action, by rank, and of the whole step."""

from __future__ import annotations

import io
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.table import Table

from ..errors import PlanError
from .action import Action, Op
from .report import Report, Span, Timeline

_NAMED = 4  # actions that an error lists


class _HasReport(Protocol):
    """Something with the prediction of a step."""

    @property
    def report(self) -> Report: ...


@dataclass(frozen=True)
class Line:
    """One number, predicted and executed."""

    what: str
    predicted: float
    executed: float

    @property
    def ratio(self) -> float:
        """Executed over predicted."""
        return self.executed / self.predicted if self.predicted else float("inf") if self.executed else 1.0


@dataclass(frozen=True)
class Comparison:
    """The mean time of each kind of computation; that of each rank, from first start to last end; the step."""

    kinds: tuple[Line, ...]
    ranks: tuple[Line, ...]
    step: Line
    unit: str

    def __str__(self) -> str:
        table = Table("", "predicted", "executed", "ratio", title="predicted and executed")
        for line in (*self.kinds, *self.ranks, self.step):
            numbers = f"{line.predicted:.4g} {self.unit}", f"{line.executed:.4g} {self.unit}", f"{line.ratio:.3f}"
            table.add_row(line.what, *numbers)
        out = io.StringIO()
        Console(file=out, width=100, markup=False).print(table)
        return out.getvalue().rstrip()


def compare(plan: Report | _HasReport, executed: Timeline | Iterable[Timeline]) -> Comparison:
    """Compare the prediction of a step with its execution.

    `executed` is `schedule.trace()` of a step, or those of several ranks: ranks that are in none of them are left out.
    On the others all planned actions must have been executed, in the planned order.
    Clocks of several machines may differ; on one they do not. A TrainingPlan keeps the ratio, and prints it.

    >>> from pipecut.schedule import Costs, plan_for, simulate
    >>> report = simulate(plan_for("1F1B", ranks=2, microbatches=2), Costs())
    >>> compare(report, report.timeline).step
    Line(what='step', predicted=9.0, executed=9.0)
    """
    report = plan if isinstance(plan, Report) else getattr(plan, "report", None)
    if not isinstance(report, Report):
        raise PlanError(
            f"compare() takes the prediction of a step, and got a {type(plan).__name__}: give the result of "
            "pipecut.plan(), or that of simulate(plan, costs)."
        )
    timelines = [executed] if isinstance(executed, Timeline) else list(executed or ())
    timed = {span.action.op for span in report.timeline}  # the sums of ties too, if they were predicted
    seen = [span for timeline in timelines for span in timeline if span.action.is_compute or span.action.op in timed]
    if not seen:
        raise PlanError("There is nothing to compare: switch tracing on (schedule.tracing = True) before the step.")
    _check_executed(report, seen)
    present = sorted({span.rank for span in seen})
    predicted = [span for span in report.timeline if span.rank in present]
    unit = next((timeline.unit for timeline in timelines if timeline.unit), "")
    found = Comparison(
        kinds=tuple(_kinds(predicted, seen)),
        ranks=tuple(Line(f"rank {rank}", _length(_of(rank, predicted)), _length(_of(rank, seen))) for rank in present),
        step=Line("step", _length(predicted), _length(seen)),
        unit=unit,
    )
    note = getattr(plan, "note_executed", None)  # a training plan prints what its times have been worth
    if note is not None:
        note(found.step.ratio)
    return found


def _kinds(predicted: list[Span], seen: list[Span]) -> Iterable[Line]:
    for op in dict.fromkeys(span.action.op for span in predicted):
        both = [_times_of(op, spans) for spans in (predicted, seen)]
        if all(both):
            yield Line(op.name.lower().replace("_", " "), *map(statistics.fmean, both))


def _times_of(op: Op, spans: list[Span]) -> list[float]:
    """Return the times of actions of a kind; the sum of a tie begins when the last of its ranks arrives."""
    found = [span for span in spans if span.action.op is op]
    if op is not Op.REDUCE_TIES:
        return [span.end - span.start for span in found]
    starts: dict[int | None, list[float]] = {}
    for span in found:
        starts.setdefault(span.action.microbatch, []).append(span.start)
    # Ranks in one process take turns: whoever begins after the end of another was not waited for.
    return [span.end - max(start for start in starts[span.action.microbatch] if start <= span.end) for span in found]


def _of(rank: int, spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.rank == rank]


def _length(spans: list[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _check_executed(report: Report, seen: Iterable[Span]) -> None:
    """Raise if a rank that computed did not run the actions of the plan in their order."""
    rows: dict[int, list[Action]] = {}
    for span in sorted((span for span in seen if span.action.is_compute), key=lambda each: each.start):
        rows.setdefault(span.rank, []).append(span.action)
    planned = report.timeline.by_rank
    for rank, executed in sorted(rows.items()):
        predicted = planned[rank] if rank < len(planned) else ()
        # Sums of ties are compared where there are any; a timeline of computations alone is complete without them.
        expected = [span.action for span in predicted if span.action.is_compute]
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
        named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
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
