"""The passes of torch.distributed.pipelining over lists and dicts of its actions, with its results.

They work on upstream's actions as they are, and know what has been done by numbers: an order of 64 ranks has a hundred
thousand actions, and turning each into one of pipecut's and back would take longer than the passes themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import PlanError
from ..schedule import (
    COMPUTE,
    GIVES,
    NEIGHBOUR,
    RECEIVES,
    SENDS,
    TRANSFERS,
    WHOLE_STAGE,
    Dataflow,
    Op,
    Placement,
    shard_row,
)
from .actions import (
    Order,
    ScheduleFaultError,
    UpstreamAction,
    UpstreamOrder,
    UpstreamRow,
    from_upstream,
    row_from_upstream,
    row_to_upstream,
    to_upstream,
)

RankOf = Callable[[int], int]
Needs = dict[Op, Sequence[Sequence[tuple[int, Op]]]]
Messages = dict[Op, Sequence[Sequence[tuple[Op, Op, int, int]]]]

_F, _I, _W, _B = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD
_RECEIVE_OF = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}
_RECEIVED_BY = {_F: Op.RECV_F, _I: Op.RECV_B, _B: Op.RECV_B}


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
    """Add REDUCE_GRAD to one rank's actions, right after as many B and W of a stage as there are microbatches."""
    reduced: UpstreamRow = []
    seen: dict[int, int] = {}
    for action in actions:
        if action is None:
            continue
        reduced.append(action)
        for stage, op, _, _ in action[3] or (action,):
            if op is _B or op is _W:
                seen[stage] = count = seen.get(stage, 0) + 1
                if count == n_microbatches:
                    reduced.append(UpstreamAction(stage, Op.REDUCE_GRAD))
    return reduced


def merge_bw(compute_actions: Iterable[UpstreamAction | None]) -> UpstreamRow:
    """Merge adjacent I and W of one stage and microbatch into B, in one rank's actions."""
    merged: UpstreamRow = []
    open_input: tuple[int, int | None] | None = None  # stage and microbatch of an I that came just before
    for action in compute_actions:
        if action is None:
            continue
        stage, op, microbatch, _ = action
        if op is _W and open_input == (stage, microbatch):
            merged[-1] = UpstreamAction(stage, _B, microbatch)
            open_input = None
        else:
            merged.append(action)
            open_input = (stage, microbatch) if op is _I else None
    return merged


def defer_recv_ops(actions: Order, stage_to_rank: RankOf) -> UpstreamOrder:
    """Move every RECV as late as it may be: before its use, and, from a higher rank, before the next SEND to it."""
    return {rank: _deferred(rank, row, stage_to_rank) for rank, row in actions.items()}


def _deferred(rank: int, row: Iterable[UpstreamAction | None], stage_to_rank: RankOf) -> UpstreamRow:
    late: UpstreamRow = []
    waiting: dict[tuple[Op, int, int | None], list[UpstreamAction]] = {}  # several where a stage has several sources
    for action in row:
        if action is None:
            late.append(action)
            continue
        stage, op, microbatch, parts = action
        if op in RECEIVES:
            waiting.setdefault((op, stage, microbatch), []).append(action)
            continue
        if op in SENDS:
            peer = stage_to_rank(_other_stage(action))
            if rank < peer:
                for key in [key for key, (each, *_) in waiting.items() if stage_to_rank(_other_stage(each)) == peer]:
                    late += waiting.pop(key)
        elif op in COMPUTE:
            for part_stage, part_op, part_microbatch, _ in parts or (action,):
                if part_op is not _W:
                    late += waiting.pop((_RECEIVED_BY[part_op], part_stage, part_microbatch), ())
        late.append(action)
    if waiting:
        left = ", ".join(str(action) for each in waiting.values() for action in each)
        raise ScheduleFaultError(
            f"Rank {rank} receives what nothing on it uses: {left}. Add the computations, or leave these out."
        )
    return late


def _other_stage(action: UpstreamAction) -> int:
    if type(action) is not UpstreamAction:
        return from_upstream(action).other_stage
    return action[0] + NEIGHBOUR[action[1]]


class _Chain:
    """The dependencies of stages in a row, taken from the rules of plans, as tables by op and stage: quick to ask."""

    def __init__(self, stage_to_rank: RankOf, num_stages: int) -> None:
        self.flow = Dataflow.chain(num_stages)
        self.placement = Placement(tuple(map(stage_to_rank, range(num_stages))))
        self.stages = range(num_stages)
        # Pairs (stage, op). Of its own stage a computation needs what stands before it, as with upstream.
        self.needs: Needs = {
            op: [
                [(other, need) for need, other in self.flow.needs(op, stage) if other != stage] for stage in self.stages
            ]
            for op in GIVES
        }

    def needs_with_messages(self) -> Needs:
        """Return the needs in an order with messages, where a value of another rank is a receive."""
        rank_of = self.placement.rank_of
        computations: Needs = {
            op: [
                [(stage, receive) for receive, _ in self.flow.receives(op, stage, self.placement)]
                + [(other, need) for other, need in self.needs[op][stage] if rank_of[other] == rank_of[stage]]
                for stage in self.stages
            ]
            for op in GIVES
        }
        return computations | {
            Op.SEND_F: [[(stage, Op.FORWARD)] for stage in self.stages],
            Op.SEND_B: [[(stage, Op.BACKWARD_INPUT)] for stage in self.stages],
            Op.RECV_F: [[(stage - 1, Op.SEND_F)] for stage in self.stages],
            Op.RECV_B: [[(stage + 1, Op.SEND_B)] for stage in self.stages],
        }

    def messages(self) -> Messages:
        """Return the messages after each computation: the send, its receive, and the receiving stage and rank."""
        return {
            op: [
                [
                    (send, _RECEIVE_OF[send], other, self.placement.rank_of[other])
                    for send, other in self.flow.messages(op, stage, self.placement)
                ]
                for stage in self.stages
            ]
            for op in GIVES
        }


def send_recv(compute_actions: Order, stage_to_rank: RankOf, num_stages: int) -> UpstreamOrder:
    """Add a SEND and a RECV for every value that goes from rank to rank; the argument is left as it is.

    The ranks take turns. What one has computed is sent and received at once, so that all meet in one common order.
    """
    chain = _Chain(stage_to_rank, num_stages)
    for_whole_stages: dict[Op, Any] = dict.fromkeys(WHOLE_STAGE, [()] * num_stages)
    needs, messages = chain.needs | for_whole_stages, chain.messages() | for_whole_stages
    rows: UpstreamOrder = {rank: [] for rank in compute_actions}
    turns = [(rank, list(compute_actions[rank])[::-1]) for rank in sorted(compute_actions)]
    done: set[tuple[Any, ...]] = set()
    while turns := [turn for turn in turns if turn[1]]:
        moved = False
        for rank, left in turns:
            action = left[-1]
            try:
                if action is not None:
                    if not _is_ready(action, needs, done):
                        continue
                    rows[rank].append(action)
                    _note(action, done)
                    _add_messages(action, rows[rank], rows, messages)
            except LookupError:
                raise ScheduleFaultError(_unknown(rank, action, rows, num_stages)) from None
            left.pop()
            moved = True
        if not moved:
            raise ScheduleFaultError(
                f"The schedule does not go on: {_places(turns)}. Each uses what another rank computes, or stands, "
                "later: move it behind that."
            )
    return rows


def _is_ready(action: UpstreamAction, needs: Needs, done: set[Any]) -> bool:
    """Return True if all that an action needs is done."""
    for stage, op, microbatch, _ in action[3] or (action,):
        for other, need in needs[op][stage]:
            if (other, need, microbatch, None) not in done:
                return False
    return True


def _note(action: UpstreamAction, done: set[Any]) -> None:
    """Count an action as done: B as I, which is how it is needed."""
    for part in action[3] or (action,):
        stage, op, microbatch, _ = part
        done.add((stage, _I, microbatch, None) if op is _B else part)


def _add_messages(action: UpstreamAction, row: UpstreamRow, rows: UpstreamOrder, messages: Messages) -> None:
    for stage, op, microbatch, _ in action[3] or (action,):
        for send, receive, other, other_rank in messages[op][stage]:
            rows[other_rank].append(UpstreamAction(other, receive, microbatch))
            row.append(UpstreamAction(stage, send, microbatch))


def _unknown(rank: int, action: UpstreamAction | None, rows: UpstreamOrder, num_stages: int) -> str:
    """Say why the tables know nothing of an action."""
    if action is not None and not {part.computation_type for part in action.sub_actions or (action,)} <= TRANSFERS:
        return (
            f"Rank {rank} has {action}: the stages are 0 to {num_stages - 1}, on ranks "
            f"{', '.join(map(str, sorted(rows)))}. Add what is missing, or leave this out."
        )
    return f"Rank {rank} has {action}: the order has transfers already. Add them to an order of computations only."


def _places(turns: Iterable[tuple[int, Sequence[object]]]) -> str:
    return ", ".join(f"rank {rank} at {left[-1]}" for rank, left in turns)


def simulate(pipeline_order: Order, stage_to_rank: RankOf, num_stages: int) -> UpstreamOrder:
    """Add a None for every slot in which a rank waits. A send is buffered, and arrives at once."""
    needs = _Chain(stage_to_rank, num_stages).needs_with_messages()
    rows: UpstreamOrder = {rank: [] for rank in sorted(pipeline_order)}
    turns = [(rank, [action for action in pipeline_order[rank] if action is not None][::-1]) for rank in rows]
    _check_known([action for _, left in turns for action in left], num_stages)
    done: set[Any] = set()

    def waits(turn: tuple[int, list[UpstreamAction]]) -> bool:
        """Do the next action of a rank, if that is possible."""
        rank, left = turn
        action = left[-1]
        ready = _is_ready(action, needs, done) if type(action) is UpstreamAction else _is_skip_ready(action, done)
        if ready:
            _note(action, done)
            rows[rank].append(left.pop())
        return not ready

    while turns := [turn for turn in turns if turn[1]]:
        waiting = list(filter(waits, turns))
        if len(waiting) == len(turns):
            raise StuckScheduleError(f"Schedule is not progressing: {_places(turns)}.")
        for rank, _ in filter(waits, waiting):  # a receive goes along with its send, also of a later rank
            rows[rank].append(None)
    return rows


def _is_skip_ready(action: UpstreamAction, done: set[Any]) -> bool:
    """Return True for a transfer between stages that are not neighbours, of which there is no table."""
    return action.computation_type in SENDS or to_upstream(from_upstream(action).counterpart) in done


def _check_known(actions: Sequence[UpstreamAction], num_stages: int) -> None:
    unknown = sorted({str(op) for op in {action[1] for action in actions} - COMPUTE - TRANSFERS})
    if unknown:
        raise StuckScheduleError(f"Unsupported action type {', '.join(unknown)}: simulate computations and transfers.")
    high = [action for action in actions if action[0] >= num_stages]
    if high:
        raise StuckScheduleError(f"{high[0]} is of no stage: there are {num_stages}, from 0 on.")
