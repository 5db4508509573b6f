"""A training plan as text: what was chosen, its stages, and what else was tried."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..split.balance import as_bytes
from .choices import Choice

if TYPE_CHECKING:
    from .training_plan import TrainingPlan

MOST_ROWS = 20


def plan_table(plan: TrainingPlan) -> str:
    """The text of a plan."""
    out = io.StringIO()
    console = Console(file=out, width=120)
    scheduled = plan.schedule_plan
    again = ", activations computed again" if plan.recompute else ""
    console.print(
        f"{plan.model_name} on {plan.ranks} ranks: {scheduled.name}, {plan.microbatches} microbatches of "
        f"{plan.microbatch}{again}\npredicted: {1000 * plan.step_time:.4g} ms a step, bubble "
        f"{plan.report.bubble_rate_makespan:.1%}, at most {as_bytes(max(plan.memory))} on a rank",
        highlight=False,
    )
    for stage, label in enumerate(plan.cuts, 1):
        console.print(
            f"  stage {stage} begins at {label}, on rank {scheduled.placement.rank_of[stage]}", highlight=False
        )
    if plan.alternatives:
        console.print(_alternatives(plan))
    return out.getvalue().rstrip()


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
    for each in plan.alternatives[:MOST_ROWS]:
        table.add_row(
            *_words(each.choice),
            "-" if each.step_time is None else f"{1000 * each.step_time:.4g}",
            "-" if each.bubble is None else f"{each.bubble:.1%}",
            "-" if each.memory is None else as_bytes(max(each.memory)),
            each.reason,
        )
    if len(plan.alternatives) > MOST_ROWS:
        table.caption = f"and {len(plan.alternatives) - MOST_ROWS} more"
    return table


def _words(choice: Choice) -> tuple[str, str, str]:
    return choice.schedule, f"{choice.microbatches} x {choice.microbatch}", "yes" if choice.recompute else "no"
