"""Table of a training plan: the choice, its stages, and the alternatives."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..schedule import lower_bound, problem_for
from ..text import format_bytes
from .choices import Choice

if TYPE_CHECKING:
    from .training_plan import TrainingPlan


_MOST_ROWS = 20


def plan_table(plan: TrainingPlan) -> str:
    """Return the text of a plan."""
    out = io.StringIO()
    console = Console(file=out, width=120, markup=False)
    scheduled = plan.schedule_plan
    again = ", activations computed again" if plan.recompute else ""
    console.print(
        f"{plan.model_name} on {plan.ranks} ranks: {scheduled.name}, {plan.microbatches} microbatches of "
        f"{plan.microbatch}{again}\npredicted: {1000 * plan.step_time:.4g} ms per step, bubble "
        f"{plan.report.bubble_rate_makespan:.1%}\n{_bound(plan)}{_sums(plan)}\nbalance of the cut: {plan.balance}",
        highlight=False,
        soft_wrap=True,
    )
    for rank, size in enumerate(plan.memory):
        console.print(f"  rank {rank} needs at most {format_bytes(size)}", highlight=False)
    for stage, label in enumerate(plan.cuts, 1):
        console.print(
            f"  stage {stage} begins at {label}, on rank {scheduled.placement.rank_of[stage]}", highlight=False
        )
    if plan.alternatives:
        console.print(_alternatives(plan))
    return out.getvalue().rstrip()


def _bound(plan: TrainingPlan) -> str:
    """Return how far the schedule may be from the best one for this cut and placement, in words."""
    scheduled = plan.schedule_plan
    bound = lower_bound(
        problem_for(scheduled.placement, scheduled.microbatches, plan.report.costs, [float("inf")] * scheduled.ranks),
        "makespan",
    )
    computing = [span for span in plan.report.timeline if span.action.is_compute]
    taken = max(span.end for span in computing) - min(span.start for span in computing)
    aside = ", sums of shared gradients aside" if scheduled.dataflow.ties else ""
    return (
        f"no schedule of these stages takes less than {1000 * bound:.4g} ms{aside}: at most {taken / bound - 1:.1%} "
        "above the best"
    )


def _sums(plan: TrainingPlan) -> str:
    scheduled, costs = plan.schedule_plan, plan.report.costs
    total = sum(costs.tie_time(scheduled, number) for number in range(len(scheduled.dataflow.ties)))
    return f"\nof the step, {1000 * total:.4g} ms are sums of gradients that ranks share" if total else ""


def _alternatives(plan: TrainingPlan) -> Table:
    table = Table(
        "schedule",
        "microbatches",
        "recompute",
        "step, ms",
        "bubble",
        "peak memory",
        "why it lost",
        title="alternatives",
    )
    for each in plan.alternatives[:_MOST_ROWS]:
        table.add_row(
            *_words(each.choice),
            "-" if each.step_time is None else f"{1000 * each.step_time:.4g}",
            "-" if each.bubble is None else f"{each.bubble:.1%}",
            "-" if each.memory is None else format_bytes(max(each.memory)),
            each.reason,
        )
    if len(plan.alternatives) > _MOST_ROWS:
        table.caption = f"and {len(plan.alternatives) - _MOST_ROWS} more"
    return table


def _words(choice: Choice) -> tuple[str, str, str]:
    return choice.schedule, f"{choice.microbatches} x {choice.microbatch}", "yes" if choice.recompute else "no"
