"""Whether a step trains, found out in its first forwards: without a loss_fn that is up to what the model returns.

The rank of the last stage sees the output, and no backward can have begun anywhere before it does. So one microbatch
goes through all stages first; the last rank tells the others whether there was a loss; and then all do the rest, with
the backwards or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..action import Action, Op
from ..plan import Plan
from .executor import Executor

_FORWARDS = frozenset({Op.FORWARD, Op.SEND_F, Op.RECV_F})
_WITHOUT_GRADIENTS = _FORWARDS | {Op.UNSHARD, Op.RESHARD}


@dataclass(frozen=True)
class Opening:
    """The microbatch that comes to the last stage first, and the rank of that stage."""

    microbatch: int
    last_rank: int

    def includes(self, action: Action) -> bool:
        """Whether an action takes the microbatch forward."""
        return action.op in _FORWARDS and action.microbatch == self.microbatch


def opening_of(plan: Plan) -> Opening | None:
    """The opening of a plan; None if its forwards do not stand alone, but in an overlap.

    >>> from pipecut.schedule import plan_for
    >>> opening_of(plan_for("1F1B", ranks=2, microbatches=4))
    Opening(microbatch=0, last_rank=1)
    """
    last_rank = plan.placement.rank_of[plan.stages - 1]
    every = [action for row in plan.actions for action in row if action is not None]
    arrivals = [leaf for action in plan.actions[last_rank] if action is not None for leaf in action.leaves]
    first = next(leaf for leaf in arrivals if leaf.op is Op.FORWARD and leaf.stage == plan.stages - 1)
    assert first.microbatch is not None  # a forward
    opening = Opening(first.microbatch, last_rank)
    overlapped = [leaf for action in every if action.op is Op.OVERLAP_F_B for leaf in action.leaves]
    return None if any(map(opening.includes, overlapped)) else opening


def without_backwards(actions: Sequence[Action]) -> list[Action]:
    """The actions that are left if there is nothing to train with."""
    return [leaf for action in actions for leaf in action.leaves if leaf.op in _WITHOUT_GRADIENTS]


def settle(executor: Executor, *, trains: bool) -> None:
    """It is known now how the step goes on."""
    executor.batch.is_open, executor.batch.training = False, trains
    if trains:
        return
    executor.ties.finish()  # gives back the gradients that were set aside
    for stage in executor.stages.values():
        stage.flights.clear()
        stage.has_backward = False
