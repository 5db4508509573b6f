"""What ties between stages add to a step: the sums of their gradients, at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedule.costs import Costs
from ..schedule.lower import add_reduce_ties
from ..schedule.plan import Plan
from ..schedule.report import Report
from ..schedule.rules import Dataflow
from ..schedule.simulate import simulate
from ..split.chain import StageTie


def simulate_tied(plan: Plan, costs: Costs, ties: Sequence[StageTie]) -> Report:
    """A plan simulated with the sums of ties.

    The cut is chosen without them: whichever cut parts the users of a parameter pays the same sum, once a step.
    """
    tied = plan.with_dataflow(Dataflow.chain(plan.stages, ties=[tie.stages for tie in ties]))
    return simulate(add_reduce_ties(tied), replace(costs, tie_bytes=[tie.gradient_bytes for tie in ties]))


def tied_like(plan: Plan, other: Plan) -> Plan:
    """Another plan of the same stages, with the sums of the first one."""
    return add_reduce_ties(other.with_dataflow(plan.dataflow))
