"""An action in the words of torch.distributed.pipelining, for schedules and tools that were written for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import PlanError
from .action import COMPUTE, TRANSFERS, Action, Op, overlap, parse_action, transfer
from .plan import Rows


class ActionTextError(PlanError, RuntimeError):
    """A text is no action. It is a RuntimeError too, which code written for the peer expects."""


class PeerAction(NamedTuple):
    """One step of one rank, with the peer's names.

    >>> PeerAction(1, Op.FORWARD, 0), PeerAction.from_str("2SEND_B2")
    (1F0, 2SEND_B2)
    >>> as_peer(overlap(Action(1, Op.FORWARD, 1), Action(2, Op.FULL_BACKWARD, 0)))
    (1F1;2B0)OVERLAP_F_B
    """

    stage_index: int
    computation_type: Op
    microbatch_index: int | None = None
    sub_actions: tuple[PeerAction, ...] | None = None

    def __repr__(self) -> str:
        return repr(from_peer(self))

    @property
    def is_compute_op(self) -> bool:
        """Whether the action runs the stage's module, forward or backward."""
        return self.computation_type in COMPUTE

    @staticmethod
    def from_str(action_string: str) -> PeerAction | None:
        """The action that a text stands for; None for blank text."""
        try:
            action = parse_action(action_string)
        except PlanError as error:
            raise ActionTextError(f"Invalid action string: {error}") from None
        return None if action is None else as_peer(action)


class TransferToPeer(PeerAction):
    """A transfer between stages that are no neighbours, of which the peer has none: it names the other stage."""

    peer: int

    @classmethod
    def of(cls, action: Action) -> TransferToPeer:
        """The same transfer."""
        made = cls(action.stage, action.op, action.microbatch)
        made.peer = action.other_stage
        return made

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and getattr(other, "peer", None) == self.peer

    def __hash__(self) -> int:
        return hash((tuple(self), self.peer))


def as_peer(action: Action) -> PeerAction:
    """An action in the peer's words."""
    if action.op in TRANSFERS and action.peer is not None:
        return TransferToPeer.of(action)
    return PeerAction(action.stage, action.op, action.microbatch, tuple(map(as_peer, action.parts)) or None)


def from_peer(action: PeerAction | Action) -> Action:
    """An action in our own words."""
    if isinstance(action, Action):
        return action
    if action.sub_actions:
        return overlap(*map(from_peer, action.sub_actions))
    if isinstance(action, TransferToPeer):
        return transfer(action.computation_type, action.stage_index, action.microbatch_index, action.peer)
    return Action(action.stage_index, action.computation_type, action.microbatch_index)


PeerRow = list["PeerAction | None"]
PeerOrder = dict[int, PeerRow]


def row_from_peer(row: Iterable[PeerAction | None]) -> list[Action | None]:
    """The actions of one rank in our own words."""
    return [None if action is None else from_peer(action) for action in row]


def row_as_peer(row: Iterable[Action | None]) -> PeerRow:
    """The actions of one rank in the peer's words."""
    return [None if action is None else as_peer(action) for action in row]


def order_as_peer(rows: Rows) -> PeerOrder:
    """The actions of every rank, by rank.

    >>> from pipecut.schedule import Plan
    >>> order_as_peer(Plan.from_actions([["0F0", None, "0B0"]]).actions)
    {0: [0F0, None, 0B0]}
    """
    return {rank: row_as_peer(row) for rank, row in enumerate(rows)}


def order_from_peer(order: Mapping[int, Iterable[PeerAction | None]]) -> dict[int, list[Action | None]]:
    """The actions of every rank in our own words."""
    return {rank: row_from_peer(row) for rank, row in order.items()}
