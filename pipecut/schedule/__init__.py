"""Schedules as plans: the actions of every rank in one training step, from integers and without torch.

Plans are made by name or searched, lowered to messages, proven, simulated and drawn. Read action.py and plan.py
first, then rules.py, the dependencies between actions, and walk.py, the one way through a plan. Schedules are in
`families`, one file per family, registered by the decorator `schedule`.

>>> plan = plan_for("1F1B", ranks=2, microbatches=2)
>>> print(plan.grid())
rank 0 │ 0F0 0F1 ·   0B0 ·   0B1
rank 1 │ ·   1F0 1B0 1F1 1B1 ·
>>> report = simulate(plan.validate(), Costs(forward=1, backward_input=1, backward_weight=1))
>>> report.makespan, round(report.bubble_rate_makespan, 3)
(9.0, 0.333)
"""

from . import families, lower, render
from .action import COMPUTE as COMPUTE
from .action import NEIGHBOUR as NEIGHBOUR
from .action import RECEIVES as RECEIVES
from .action import SENDS as SENDS
from .action import TRANSFERS as TRANSFERS
from .action import WHOLE_STAGE as WHOLE_STAGE
from .action import Action, Op, Rows, overlap, parse_action, transfer
from .auto import FoundPlan, auto_schedule, search_schedule
from .auto import lower_bound as lower_bound
from .auto import problem_for as problem_for
from .compare import Comparison, Line, compare
from .costs import Costs, Link
from .lower import add_bubbles as add_bubbles
from .lower import add_reduce_grad as add_reduce_grad
from .lower import add_reduce_ties as add_reduce_ties
from .lower import add_transfers as add_transfers
from .lower import add_unshard_reshard as add_unshard_reshard
from .lower import drop_bubbles as drop_bubbles
from .lower import drop_reduce_ties as drop_reduce_ties
from .lower import shard_row as shard_row
from .plan import Plan
from .plan_text import load_csv as load_csv
from .registry import FAMILIES as FAMILIES
from .registry import Family as Family
from .registry import known_name as known_name
from .registry import plan_for, schedule, schedule_names
from .render import look as look
from .report import Report, Span, Timeline
from .rules import GIVES as GIVES
from .rules import Dataflow, Placement, dependencies
from .rules import tie_messages as tie_messages
from .simulate import simulate
from .validate import Fault, find_faults
from .walk import Walk as Walk

__all__ = [
    "Action",
    "Comparison",
    "Costs",
    "Dataflow",
    "Fault",
    "FoundPlan",
    "Line",
    "Link",
    "Op",
    "Placement",
    "Plan",
    "Report",
    "Rows",
    "Span",
    "Timeline",
    "auto_schedule",
    "compare",
    "dependencies",
    "families",
    "find_faults",
    "lower",
    "overlap",
    "parse_action",
    "plan_for",
    "render",
    "schedule",
    "schedule_names",
    "search_schedule",
    "simulate",
    "transfer",
]
