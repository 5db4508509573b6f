"""Actions with the names of torch.distributed.pipelining, and their conversion from and to pipecut's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import PlanError
from ..schedule import COMPUTE, TRANSFERS, Action, Op, Rows, overlap, parse_action, transfer


class ActionTextError(PlanError, RuntimeError):
    """A text is no action; also a RuntimeError, as with upstream."""


class UpstreamAction(NamedTuple):
    """One action of one rank, with the attributes of upstream's `_Action`.

    >>> UpstreamAction(1, Op.FORWARD, 0), UpstreamAction.from_str("2SEND_B2")
    (1F0, 2SEND_B2)
    >>> to_upstream(overlap(Action(1, Op.FORWARD, 1), Action(2, Op.FULL_BACKWARD, 0)))
    (1F1;2B0)OVERLAP_F_B
    """

    stage_index: int
    computation_type: Op
    microbatch_index: int | None = None
    sub_actions: tuple[UpstreamAction, ...] | None = None

    def __repr__(self) -> str:
        return repr(from_upstream(self))

    @property
    def is_compute_op(self) -> bool:
        """True if the action runs the stage's module, forward or backward."""
        return self.computation_type in COMPUTE

    @staticmethod
    def from_str(action_string: str) -> UpstreamAction | None:
        """Return the action that a text stands for; None for blank text."""
        try:
            action = parse_action(action_string)
        except PlanError as error:
            raise ActionTextError(f"Invalid action string: {error}") from None
        return None if action is None else to_upstream(action)


class SkipTransfer(UpstreamAction):
    """A transfer between stages that are not neighbours, which upstream does not have: it names the other stage."""

    peer: int

    @classmethod
    def of(cls, action: Action) -> SkipTransfer:
        """Convert a transfer."""
        made = cls(action.stage, action.op, action.microbatch)
        made.peer = action.other_stage
        return made

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and getattr(other, "peer", None) == self.peer

    def __hash__(self) -> int:
        return hash((tuple(self), self.peer))


def to_upstream(action: Action) -> UpstreamAction:
    """Convert an action of pipecut."""
    if action.op in TRANSFERS and action.peer is not None:
        return SkipTransfer.of(action)
    return UpstreamAction(action.stage, action.op, action.microbatch, tuple(map(to_upstream, action.parts)) or None)


def from_upstream(action: UpstreamAction | Action) -> Action:
    """Convert an action of upstream; one of pipecut is returned as it is."""
    if isinstance(action, Action):
        return action
    if action.sub_actions:
        return overlap(*map(from_upstream, action.sub_actions))
    if isinstance(action, SkipTransfer):
        return transfer(action.computation_type, action.stage_index, action.microbatch_index, action.peer)
    return Action(action.stage_index, action.computation_type, action.microbatch_index)


UpstreamRow = list["UpstreamAction | None"]
UpstreamOrder = dict[int, UpstreamRow]


def row_from_upstream(row: Iterable[UpstreamAction | None]) -> list[Action | None]:
    """Convert the actions of one rank from upstream's."""
    return [None if action is None else from_upstream(action) for action in row]


def row_to_upstream(row: Iterable[Action | None]) -> UpstreamRow:
    """Convert the actions of one rank to upstream's."""
    return [None if action is None else to_upstream(action) for action in row]


def order_to_upstream(rows: Rows) -> UpstreamOrder:
    """Convert the actions of all ranks to upstream's, by rank.

    >>> from pipecut.schedule import Plan
    >>> order_to_upstream(Plan.from_actions([["0F0", None, "0B0"]]).actions)
    {0: [0F0, None, 0B0]}
    """
    return {rank: row_to_upstream(row) for rank, row in enumerate(rows)}


def order_from_upstream(order: Mapping[int, Iterable[UpstreamAction | None]]) -> dict[int, list[Action | None]]:
    """Convert the actions of all ranks from upstream's."""
    return {rank: row_from_upstream(row) for rank, row in order.items()}
