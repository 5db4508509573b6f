"""Passes from Plan to Plan: from computations alone to a plan that can be executed. `lower` runs them in order."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import PlanError
from ...text import did_you_mean
from ..action import Op
from ..plan import Plan, collector_paused
from .reorder import add_bubbles, drop_bubbles, merge_backwards, merge_row, receive_early, receive_late
from .sharding import GIVES_WEIGHT_GRADIENT, add_reduce_grad, add_unshard_reshard, shard_row, spliced
from .transfers import add_reduce_ties, add_transfers, drop_reduce_ties

__all__ = [
    "GIVES_WEIGHT_GRADIENT",
    "add_bubbles",
    "add_reduce_grad",
    "add_reduce_ties",
    "add_transfers",
    "add_unshard_reshard",
    "drop_bubbles",
    "drop_reduce_ties",
    "lower",
    "merge_backwards",
    "merge_row",
    "receive_early",
    "receive_late",
    "shard_row",
    "spliced",
]

_RECEIVES: dict[str, Callable[[Plan], Plan]] = {
    "as_sent": lambda plan: plan,
    "early": receive_early,
    "late": receive_late,
}


@collector_paused
def lower(plan: Plan, *, max_held: int | None = None, receives: str = "as_sent") -> Plan:
    """Make a plan executable: add messages between ranks, sums of tied gradients and, with `max_held`, sharding.

    `max_held` is the number of stages that a rank may hold unsharded at a time (UNSHARD, RESHARD and REDUCE_GRAD are
    added); an overlap holds all of its own while it runs.
    `receives` says where a receive stands: "as_sent", at the turn of its send; "early", right after the message before
    it; "late", right before its first use. A plan that has its transfers, its sharding or its reductions keeps them.
    """
    if receives not in _RECEIVES:
        near = did_you_mean(str(receives), _RECEIVES)
        raise PlanError(f"receives={receives!r} is not known.{near} Choose one of {', '.join(map(repr, _RECEIVES))}.")
    if not plan.has_transfers:
        plan = add_transfers(plan)
    # After the transfers: a rank may shard its stages while others do not, and still meet them in the same order.
    if max_held is not None:
        plan = plan if {Op.UNSHARD, Op.RESHARD} & plan.ops else add_unshard_reshard(plan, max_held)
        plan = plan if Op.REDUCE_GRAD in plan.ops else add_reduce_grad(plan)
    return _RECEIVES[receives](add_reduce_ties(plan))
