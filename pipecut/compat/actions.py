"""Actions with the names of torch.distributed.pipelining, to and from pipecut's; orders of them as text, and proven."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import PlanError
from ..schedule import (
    COMPUTE,
    GIVES,
    TRANSFERS,
    Action,
    Op,
    Plan,
    Rows,
    find_faults,
    overlap,
    parse_action,
    transfer,
)

_F, _I, _W, _B = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD


class ActionTextError(PlanError, RuntimeError):
    """A text is not an action; also a RuntimeError, as with upstream."""


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
Order = Mapping[int, Iterable["UpstreamAction | None"]]


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


def order_from_upstream(order: Order) -> dict[int, list[Action | None]]:
    """Convert the actions of all ranks from upstream's."""
    return {rank: row_from_upstream(row) for rank, row in order.items()}


def format_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """Return a table with a line for each slot and a column for each rank.

    >>> rows = {0: [UpstreamAction(0, Op.FORWARD, 0)], 1: [None, UpstreamAction(1, Op.FORWARD, 0)]}
    >>> print(format_order(rows), end="")
            Rank 0 Rank 1
    Step 0: 0F0
    Step 1:        1F0
    """
    rows = [list(pipeline_order[rank]) for rank in sorted(pipeline_order)]
    steps = max(map(len, rows), default=0)
    cells = [["" if step >= len(row) or row[step] is None else str(row[step]) for row in rows] for step in range(steps)]
    names = [f"Rank {rank}" for rank in sorted(pipeline_order)]
    labels = [f"Step {step:0{len(str(max(steps - 1, 0)))}}" for step in range(steps)]
    least = max(map(len, labels), default=0)
    sizes = [max([least, len(name), *(len(line[at]) for line in cells)]) for at, name in enumerate(names)]
    lines = [" " * (least + 2) + " ".join(name.ljust(size) for name, size in zip(names, sizes, strict=True))]
    for step, (label, line) in enumerate(zip(labels, cells, strict=True)):
        text = " ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True))
        lines.append(f"{label}: {text}" + (" <-- ERROR HERE" if step == error_step_number else ""))
    return "\n".join(lines) + "\n"


# The proof of an order: quick if there is no fault, otherwise with all of them.


class ScheduleFaultError(PlanError, AssertionError):
    """A schedule is incomplete or out of order; also an AssertionError, as with upstream."""


def in_new_notation(order: Order) -> UpstreamOrder:
    """Return an order in which a B that a W of the same stage and microbatch follows is an I, as it was once written.

    >>> in_new_notation({0: [UpstreamAction(0, op, 0) for op in (Op.FORWARD, Op.FULL_BACKWARD, Op.BACKWARD_WEIGHT)]})
    {0: [0F0, 0I0, 0W0]}
    """
    rows = {}
    for rank, row in order.items():
        kept: UpstreamRow = []
        weights = set()  # read from the end: the W that come later
        for action in reversed(list(row)):
            if action is not None:
                stage, op, microbatch, _ = action
                if op is _W:
                    weights.add((stage, microbatch))
                elif op is _B and (stage, microbatch) in weights:
                    action = UpstreamAction(stage, _I, microbatch)
            kept.append(action)
        rows[rank] = kept[::-1]
    return rows


def validate_schedule(
    actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int, *, training: bool = True
) -> dict[int, int]:
    """Return the rank of each stage; raise with every fault of the computations, which alone count here."""
    if len(actions) != pp_group_size:
        raise ScheduleFaultError(
            f"Schedule has incorrect number of ranks - expected {pp_group_size}, actual {len(actions)}"
        )
    rank_of = _ranks_if_valid(actions, num_stages, num_microbatches) if training else None
    if rank_of is not None:
        return rank_of
    rows = {
        rank: [action for action in row if action is None or action.is_compute]
        for rank, row in order_from_upstream(in_new_notation(actions)).items()
    }
    try:
        plan = Plan.from_actions(rows, microbatches=num_microbatches, training=training)
    except PlanError as error:
        raise ScheduleFaultError(str(error)) from None
    if plan.stages != num_stages:
        raise ScheduleFaultError(f"The schedule has {plan.stages} stages, and there are {num_stages}.")
    faults = find_faults(plan)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ScheduleFaultError(f"The schedule cannot run:\n{lines}\n{format_order(actions)}", faults)
    return dict(enumerate(plan.placement.rank_of))


def _ranks_if_valid(actions: Order, num_stages: int, microbatches: int) -> dict[int, int] | None:
    """Walk through an order, and return the rank of each stage if all is there and in order.

    It is the quick answer for an order without faults. For another one it returns None: what is wrong with that is a
    question for the rules of plans, with all of their messages.
    """
    rank_of: dict[int, int] = {}
    state = bytearray(num_stages * microbatches)
    known = set(range(microbatches))
    walks = []
    for rank, actions_of_rank in sorted(actions.items()):
        row: list[Any] = list(filter(None, actions_of_rank))
        stages, numbers = {action[0] for action in row}, {action[2] for action in row}
        if None in numbers:  # overlaps, and what is for a whole stage
            leaves = [leaf for action in row for leaf in action[3] or (action,) if leaf[1] in GIVES]
            stages, numbers = {leaf[0] for leaf in leaves}, {leaf[2] for leaf in leaves}
        if not numbers <= known or stages & rank_of.keys():
            return None
        rank_of |= dict.fromkeys(stages, rank)
        walks.append(_walk(row, state, microbatches))
    if set(rank_of) != set(range(num_stages)):
        return None
    before = b""
    while walks:
        if state == before:
            return None
        before = bytes(state)
        # A walk ends, or waits for others. Forwards go up the ranks, backwards down.
        walks = [walk for walk in reversed(walks) if next(walk, _ENDED) is not _ENDED]
    return rank_of if set(state) <= {_WHOLE, _IN_PARTS} else None


_ENDED = object()
# States of a microbatch in a stage, which begin with 0, in the order in which they come.
_FORWARD_DONE, _INPUT_DONE, _WHOLE, _IN_PARTS = 1, 2, 3, 4


def _walk(row: Iterable[Any], state: bytearray, count: int) -> Iterator[None]:
    """Do the actions of a rank; yield wherever it has to wait."""
    last = len(state) - count
    for stage, op, microbatch, parts in row:
        if op is _F:
            place = stage * count + microbatch
            while state[place] or (stage and not state[place - count]):
                yield
            state[place] = _FORWARD_DONE
        elif op is _B or op is _I:
            place = stage * count + microbatch
            while state[place] != _FORWARD_DONE or (place < last and state[place + count] < _INPUT_DONE):
                yield
            state[place] = _WHOLE if op is _B else _INPUT_DONE
        elif op is _W:
            place = stage * count + microbatch
            while state[place] != _INPUT_DONE and state[place] != _WHOLE:  # a B that was once written for an I
                yield
            state[place] = _IN_PARTS
        elif parts:
            while not _do_together(parts, state, count):
                yield


def _do_together(parts: Sequence[UpstreamAction], state: bytearray, count: int) -> bool:
    """Do the parts of an overlap, all or none."""
    before = bytes(state)
    done = next(_walk(parts, state, count), _ENDED) is _ENDED
    if not done:
        state[:] = before
    return done
