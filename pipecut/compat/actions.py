"""Actions with the names of torch.distributed.pipelining, and its lowering passes on lists and dicts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..errors import PlanError
from ..schedule import (
    COMPUTE,
    GIVES,
    GIVES_WEIGHT_GRADIENT,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Dataflow,
    Op,
    Placement,
    Plan,
    Rows,
    add_transfers,
    dependencies,
    find_faults,
    merge_row,
    overlap,
    parse_action,
    shard_row,
    spliced,
    transfer,
)


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


# Passes.

RankOf = Callable[[int], int]
Order = Mapping[int, Iterable["UpstreamAction | None"]]


class ScheduleFaultError(PlanError, AssertionError):
    """A schedule is incomplete or out of order; also an AssertionError, as with upstream."""


class StuckScheduleError(PlanError):
    """A schedule with messages deadlocks."""


def unshard_reshard(compute_actions: Iterable[UpstreamAction | None], max_active_stages: int = 3) -> UpstreamRow:
    """Add UNSHARD and RESHARD to one rank's actions.

    >>> unshard_reshard([UpstreamAction(0, Op.FORWARD, 0)])
    [0UNSHARD, 0F0, 0RESHARD]
    """
    row = row_from_upstream(compute_actions)
    stages = sorted({leaf.stage for action in row if action is not None for leaf in action.leaves})
    return row_to_upstream(shard_row(row, max_active_stages, stages))


def reduce_grad(actions: Iterable[UpstreamAction | None], n_microbatches: int) -> UpstreamRow:
    """Add REDUCE_GRAD to one rank's actions, right after the last weight gradient of each stage."""
    row = [action for action in row_from_upstream(actions) if action is not None]
    seen: dict[int, int] = {}
    after: dict[int, list[Action]] = {}
    for step, action in enumerate(row):
        for leaf in action.leaves:
            if leaf.op in GIVES_WEIGHT_GRADIENT:
                seen[leaf.stage] = seen.get(leaf.stage, 0) + 1
                if seen[leaf.stage] == n_microbatches:
                    after.setdefault(step + 1, []).append(Action(leaf.stage, Op.REDUCE_GRAD))
    return row_to_upstream(spliced(row, after))


def merge_bw(compute_actions: Iterable[UpstreamAction | None]) -> UpstreamRow:
    """Merge adjacent I and W of one stage and microbatch into B, in one rank's actions."""
    return row_to_upstream(merge_row(row_from_upstream(compute_actions)))


def plan_of(order: Order, stage_to_rank: RankOf, num_stages: int, microbatches: int | None = None) -> Plan:
    """Make a plan of all ranks' actions, without validating it."""
    rows = order_from_upstream(order)
    leaves = [leaf for row in rows.values() for action in row if action is not None for leaf in action.leaves]
    numbers = [leaf.microbatch for leaf in leaves if leaf.microbatch is not None]
    return Plan.from_actions(
        rows,
        placement=Placement(tuple(map(stage_to_rank, range(num_stages)))),
        microbatches=max([0, *numbers]) + 1 if microbatches is None else microbatches,
        dataflow=Dataflow.chain(num_stages) if microbatches is None else None,
    )


def send_recv(compute_actions: Order, stage_to_rank: RankOf, num_stages: int) -> UpstreamOrder:
    """Add a SEND and a RECV for every value that goes from rank to rank; the argument is left as it is."""
    try:
        plan = plan_of(compute_actions, stage_to_rank, num_stages)
        return order_to_upstream(add_transfers(plan, complete=False).actions)
    except PlanError as error:
        raise ScheduleFaultError(str(error), error.faults) from None


def defer_recv_ops(actions: Order, stage_to_rank: RankOf) -> UpstreamOrder:
    """Move every RECV as late as it may be: before its use, and, from a higher rank, before the next SEND to it."""
    deferred = {}
    for rank, row in order_from_upstream(actions).items():
        late: list[Action | None] = []
        waiting: list[Action] = []
        for action in row:
            if action is not None and action.op in RECEIVES:
                waiting.append(action)
                continue
            due = [] if action is None else _due(action, waiting, rank, stage_to_rank)
            late += [*due, action]
            waiting = [receive for receive in waiting if receive not in due]
        deferred[rank] = row_to_upstream([*late, *waiting])
    return deferred


def _due(action: Action, waiting: list[Action], rank: int, stage_to_rank: RankOf) -> list[Action]:
    """Return the receives that must come before an action."""
    if action.op in SENDS:
        peer = stage_to_rank(action.other_stage)
        return [each for each in waiting if rank < peer and stage_to_rank(each.other_stage) == peer]
    if action.op not in COMPUTE:
        return []
    uses = {(Op.RECV_F if leaf.op is Op.FORWARD else Op.RECV_B, leaf.stage, leaf.microbatch) for leaf in action.leaves}
    return [each for each in waiting if (each.op, each.stage, each.microbatch) in uses]


def simulate(pipeline_order: Order, stage_to_rank: RankOf, num_stages: int) -> UpstreamOrder:
    """Add a None for every slot in which a rank waits. A send is buffered, and arrives at once."""
    plan = plan_of(pipeline_order, stage_to_rank, num_stages)
    unknown = sorted({str(op) for op in plan.ops - COMPUTE - TRANSFERS})
    if unknown:
        raise StuckScheduleError(f"Unsupported action type {', '.join(unknown)}: simulate computations and transfers.")
    left = [[action for action in row if action is not None] for row in plan.actions]
    rows: list[list[Action | None]] = [[] for _ in left]
    done: set[Action] = set()
    while any(left):
        ready = _ready(plan, [row[0] if row else None for row in left], done)
        if not ready:
            waiting = ", ".join(f"rank {rank} at {row[0]}" for rank, row in enumerate(left) if row)
            raise StuckScheduleError(f"Schedule is not progressing: {waiting}.")
        for rank, row in enumerate(left):
            if row:
                rows[rank].append(row.pop(0) if rank in ready else None)
        for rank in ready:
            done |= _given_by(rows[rank][-1])
    return {rank: row_to_upstream(row) for rank, row in enumerate(rows)}


def _ready(plan: Plan, turn: list[Action | None], done: set[Action]) -> set[int]:
    """Return the ranks whose next action can run; a receive goes along with its send."""
    ready: set[int] = set()
    for receives in (False, True):
        sent = {each for rank in ready for each in _given_by(turn[rank])}
        for rank, action in enumerate(turn):
            if action is None or (action.op in RECEIVES) is not receives:
                continue
            if set(dependencies(action, plan.dataflow, plan.placement)) <= done | sent:
                ready.add(rank)
    return ready


def _given_by(action: Action | None) -> set[Action]:
    """Return the actions that count as done once this one is: B gives what I and W give."""
    leaves = () if action is None else action.leaves
    return {leaf._replace(op=given) for leaf in leaves for given in GIVES.get(leaf.op, (leaf.op,))}


def validate_schedule(
    actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int, *, training: bool = True
) -> dict[int, int]:
    """Return the rank of each stage; raise with every fault of the computations, which alone count here."""
    if len(actions) != pp_group_size:
        raise ScheduleFaultError(
            f"Schedule has incorrect number of ranks - expected {pp_group_size}, actual {len(actions)}"
        )
    rows = {
        rank: [action for action in row if action is None or action.is_compute]
        for rank, row in order_from_upstream(actions).items()
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
