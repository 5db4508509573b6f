"""Simulation of a big plan, all ranks together, and the record of it in arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .action import MOST_NUMBERS, MOST_STAGES, NEIGHBOUR, OP_NUMBERS, OP_SHIFT, STAGE_SHIFT, Op, decoded
from .costs import Costs
from .lockstep import Floats, Ints, Lockstep, codes_of, ends_of
from .plan import Plan
from .report import Idle, Span, Wait
from .rules import GIVES

_COMPUTE = {op: OP_NUMBERS[op] for op in GIVES}
_SEND_OF = {Op.FORWARD: Op.SEND_F, Op.BACKWARD_INPUT: Op.SEND_B, Op.FULL_BACKWARD: Op.SEND_B}


@dataclass(frozen=True, eq=False)
class BigRecord:
    """The computations of a run by rank and start: a `Record` in numpy's arrays, which are quick to sum up."""

    bounds: Ints  # the computations of rank r are those from bounds[r] to bounds[r + 1]
    codes: Ints
    starts: Floats
    ends: Floats
    before: Ints
    waits: npt.NDArray[np.int8]

    def by_rank(self, ranks: int) -> Sequence[range]:
        """Return the numbers of each rank's computations."""
        return [range(*map(int, self.bounds[rank : rank + 2])) for rank in range(ranks)]

    def span(self, number: int) -> Span:
        """Return one computation."""
        action = decoded(int(self.codes[number]))
        assert action is not None
        rank = int(np.searchsorted(self.bounds, number, side="right")) - 1
        return Span(rank, action, float(self.starts[number]), float(self.ends[number]))

    def spans(self, rows: Sequence[Sequence[int]]) -> tuple[Span, ...]:
        """Return all computations by rank and start."""
        actions = [action for action in map(decoded, self.codes.tolist()) if action is not None]
        ranks = [rank for rank, row in enumerate(rows) for _ in row]
        return tuple(map(Span, ranks, actions, self.starts.tolist(), self.ends.tolist()))

    def last(self) -> int:
        """Return the number of the computation that ends last, or -1."""
        return int(np.argmax(self.ends)) if len(self.ends) else -1

    def busy(self, row: Sequence[int]) -> float:
        """Return the time that a rank computes."""
        part = slice(row[0], row[-1] + 1) if row else slice(0)
        return _sum(self.ends[part] - self.starts[part])

    def peak(self, row: Sequence[int], memory: Mapping[Op, tuple[float, ...]], *, training: bool) -> float:
        """Return the most that a rank holds."""
        codes = self.codes[row[0] : row[-1] + 1] if row else self.codes[:0]
        growth = np.zeros(len(codes))
        for op, number in _COMPUTE.items():
            chosen = np.flatnonzero(codes >> OP_SHIFT == number)
            growth[chosen] = np.array(memory[op])[codes[chosen] >> STAGE_SHIFT & MOST_STAGES]
        held = np.concatenate(([0.0], np.cumsum(growth)[:-1])) if training else np.zeros(len(codes))
        return float(np.maximum(held + np.maximum(growth, 0), 0).max(initial=0.0))

    def idle(self, row: Sequence[int], makespan: float) -> Idle:
        """Return the idle time of a rank by its cause."""
        if not row:
            return Idle(0.0, 0.0, 0.0, 0.0, end=makespan)
        part = slice(row[0], row[-1] + 1)
        starts, ends, waits, before = self.starts[part], self.ends[part], self.waits[part], self.before[part]
        gaps = starts - np.append(starts[0], ends[:-1])
        left = np.where(before >= 0, self.ends[before], 0.0)
        wires = np.where((waits == Wait.RANK) | (gaps <= 0), 0.0, np.minimum(gaps, starts - left))
        waited = np.maximum(gaps, 0.0) - wires
        forward = _sum(waited[waits == Wait.FORWARD])
        backward = _sum(waited[waits != Wait.FORWARD])
        return Idle(float(starts[0]), forward, backward, _sum(wires), makespan - float(ends[-1]))


def _sum(values: Floats) -> float:
    """Return the sum in the order of the values, as adding one after the other gives it."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def simulate_together(plan: Plan, costs: Costs) -> BigRecord | None:
    """Simulate a big plan; None if it may not be able to run."""
    steps = Lockstep(plan)
    if not (plan.is_proven if plan.has_transfers else steps.note_slots() and steps.is_in_order()):
        return None
    codes, bounds, senders = _computations(steps)
    op, stage = codes >> OP_SHIFT, codes >> STAGE_SHIFT & MOST_STAGES
    table = costs.table(plan)
    durations, makers = np.empty(len(codes)), np.full(len(codes), -1)
    travels, waits = np.zeros(len(codes)), np.zeros(len(codes), dtype=np.int8)
    for kind, number in _COMPUTE.items():
        chosen = np.flatnonzero(op == number)
        durations[chosen] = np.array(table.time[kind])[stage[chosen]]
        send = _SEND_OF.get(kind)
        if send is None:
            continue
        step = -NEIGHBOUR[send]
        travel = np.full(plan.stages, np.nan)  # by receiving stage; nan where nothing is sent
        for other in range(max(0, step), min(plan.stages, plan.stages + step)):
            if plan.placement.rank_of[other] != plan.placement.rank_of[other - step]:
                travel[other - step] = costs.message_time(plan.placement, send, other, other - step)
        chosen = chosen[~np.isnan(travel[stage[chosen]])]
        flags = steps.flag(int(send is Op.SEND_B), stage[chosen] + step, (codes[chosen] & MOST_NUMBERS) - 1)
        makers[chosen], travels[chosen] = senders[flags], travel[stage[chosen]]
        waits[chosen] = Wait.BACKWARD if send is Op.SEND_B else Wait.FORWARD
    ends = ends_of(bounds, makers, travels, durations)
    return None if ends is None else _record(bounds, codes, makers, travels, ends, waits)


def _record(
    bounds: Ints, codes: Ints, makers: Ints, travels: Floats, ends: Floats, waits: npt.NDArray[np.int8]
) -> BigRecord:
    """Return the record: a computation waits for its maker if that comes after the one before it on its rank."""
    total = len(codes)
    before = np.arange(-1, total - 1)
    firsts = bounds[:-1][bounds[:-1] < bounds[1:]]
    before[firsts] = -1
    free = np.where(before >= 0, ends[before], 0.0)
    arrivals = np.where(makers >= 0, ends[makers] + travels, -np.inf)
    late = arrivals > free
    return BigRecord(
        bounds,
        codes,
        np.maximum(free, arrivals),
        ends,
        np.where(late, makers, before),
        np.where(late, waits, Wait.RANK).astype(np.int8),
    )


def _computations(steps: Lockstep) -> tuple[Ints, Ints, Ints]:
    """Return the codes of all computations, the bounds of each rank's, and the computation at whose end messages leave.

    The latter by direction (0 activations, 1 gradients), sending stage and microbatch.
    """
    plan = steps.plan
    senders = np.full(2 * plan.stages * plan.microbatches, -1)
    found, bounds = [], [0]
    leaves = (
        {Op.SEND_F: 0, Op.SEND_B: 1}
        if plan.has_transfers
        else {Op.FORWARD: 0, Op.BACKWARD_INPUT: 1, Op.FULL_BACKWARD: 1}
    )
    for rank, row in enumerate(plan.actions):
        op, stage, number = steps.columns(rank)
        computes = op < OP_NUMBERS[Op.SEND_F]
        latest = bounds[-1] + np.cumsum(computes) - 1
        for kind, direction in leaves.items():
            chosen = np.flatnonzero(op == OP_NUMBERS[kind])
            senders[steps.flag(direction, stage[chosen], number[chosen])] = latest[chosen]
        found.append(codes_of(row)[computes])
        bounds.append(bounds[-1] + len(found[-1]))
    return np.concatenate(found), np.array(bounds), senders
