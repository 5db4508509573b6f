"""Fill the idle slots of a plan with passes that can run then, within a limit on the activations of a rank.

The ranks go through the plan in slots of one pass each. A rank whose next pass waits for another rank takes the first
of its later passes that does not, provided that it never holds more activations than allowed: neither now nor until
the place that the pass came from. Only idle slots are used, so nothing comes later than before. Done from the end of a
plan to its start, the same moves passes as late as they can be.
"""

from __future__ import annotations

from typing import NamedTuple

from ...errors import PlanError
from ..action import Action, Op
from ..plan import Plan

_Kind = tuple[Op, int]  # op and stage
_Times = list[int]  # by microbatch: the slot before which a pass is finished
_NEVER = 1 << 60
_HOLDS = {Op.FORWARD: 1, Op.BACKWARD_INPUT: 0, Op.BACKWARD_WEIGHT: -1}


def fill_early(plan: Plan, limit: int) -> Plan:
    """Fill idle slots from the start. `limit`: how many activations, of one stage and microbatch each, a rank may hold.

    >>> rows = ["0F0 0I0 0W0 0F1 0I1 0W1".split(), "1F0 1I0 1W0 1F1 1I1 1W1".split()]
    >>> print(Plan.from_actions(rows).grid())
    rank 0 │ 0F0 ·   ·   0I0 0W0 0F1 ·   ·   0I1 0W1
    rank 1 │ ·   1F0 1I0 1W0 ·   ·   1F1 1I1 1W1 ·
    >>> print(fill_early(Plan.from_actions(rows), limit=2).grid())
    rank 0 │ 0F0 0F1 ·   0I0 0W0 ·   0I1 0W1
    rank 1 │ ·   1F0 1I0 1W0 1F1 1I1 1W1 ·
    """
    return _filled(plan, limit, direction=1)


def fill_late(plan: Plan, limit: int) -> Plan:
    """Fill idle slots from the end.

    >>> rows = ["0F0 0I0 0W0 0F1 0I1 0W1".split(), "1F0 1I0 1W0 1F1 1I1 1W1".split()]
    >>> print(fill_late(Plan.from_actions(rows), limit=2).grid())
    rank 0 │ 0F0 0F1 ·   0I0 0W0 0I1 0W1
    rank 1 │ ·   1F0 1I0 1F1 1I1 1W0 1W1
    """
    return _filled(plan, limit, direction=-1)


def _filled(plan: Plan, limit: int, *, direction: int) -> Plan:
    """Fill a plan from its start (1), or from its end (-1), where every pass comes after those that need it."""
    ranks = [_Rank(row, limit) for row in _rows_of_passes(plan, direction)]
    rows: list[list[Action]] = [[] for _ in ranks]
    now, left = 0, sum(len(rank.row) for rank in ranks)
    while left:
        before = left
        for rank, row in zip(ranks, rows, strict=True):
            action = rank.take(now)
            if action is not None:
                row.append(action)
                left -= 1
        if left == before:
            raise PlanError(
                f"The plan '{plan.name}' cannot run: nothing moves at slot {now}. plan.validate() tells why."
            )
        now += 1
    return plan.with_actions(row[::direction] for row in rows)


class _Pass(NamedTuple):
    action: Action
    microbatch: int
    kind: int
    growth: int  # of the activations held
    waits: list[_Times]  # of the kinds that it waits for
    finished: _Times  # of its own kind


def _rows_of_passes(plan: Plan, direction: int) -> list[list[_Pass]]:
    kinds: list[_Kind] = [(op, stage) for op in _HOLDS for stage in range(plan.stages)]
    finished = {kind: [_NEVER] * plan.microbatches for kind in kinds}
    waits: dict[_Kind, list[_Times]] = {kind: [] for kind in kinds}
    for kind in kinds:
        for need in plan.dataflow.needs(*kind):
            first, then = (need, kind) if direction > 0 else (kind, need)
            waits[then].append(finished[first])
    about = {
        kind: (number, direction * _HOLDS[kind[0]], waits[kind], finished[kind]) for number, kind in enumerate(kinds)
    }
    return [
        [
            _Pass(action, action.microbatch or 0, *about[action.op, action.stage])
            for action in row[::direction]
            if action is not None
        ]
        for row in plan.actions
    ]


class _Rank:
    """The passes that one rank has still to do, in the order of the plan, and the activations that it holds."""

    def __init__(self, row: list[_Pass], limit: int) -> None:
        self.row = row
        self.limit = limit
        self.held = 0
        self.first = 0  # everything before it is taken
        self.taken = bytearray(len(row))
        self.kinds = len({each.kind for each in row})

    def take(self, now: int) -> Action | None:
        """Run a pass in this slot, if there is one that can."""
        row, taken = self.row, self.taken
        while self.first < len(row) and taken[self.first]:
            self.first += 1
        held = most = self.held  # at a place, and at most from now until there
        seen: set[int] = set()
        for place in range(self.first, len(row)):
            if taken[place]:
                continue
            action, microbatch, kind, growth, waits, finished = row[place]
            if kind not in seen:  # the passes of one kind keep their order
                if place == self.first or growth <= 0 or most < self.limit:
                    for others in waits:
                        if others[microbatch] > now:
                            break
                    else:
                        taken[place] = 1
                        finished[microbatch] = now + 1
                        self.held += growth
                        return action
                seen.add(kind)
                if len(seen) == self.kinds:
                    return None
            held += growth
            most = max(most, held)
        return None
