"""Building blocks of schedules: streams of passes, turns among them, rounds through chunks, idle slots filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from ...errors import PlanError
from ..action import Action, Op, first_code
from ..plan import Plan


def passes(stage: int, op: Op, microbatches: range) -> Iterator[int]:
    """Return the codes of one pass of a stage for every microbatch, in order.

    >>> from pipecut.schedule.action import CodedRow
    >>> CodedRow(passes(2, Op.FORWARD, range(3)))
    (2F0, 2F1, 2F2)
    """
    first = first_code(stage, op)
    return iter(range(first + microbatches.start, first + microbatches.stop, microbatches.step))


_One = TypeVar("_One")  # a code, or an action


def turns(rounds: int, *streams: Iterator[_One]) -> Iterator[_One]:
    """Take the next pass of every stream in turn, so many rounds; fewer if the first stream ends before.

    The passes that are not taken stay in the streams.

    >>> from pipecut.schedule.action import CodedRow
    >>> forwards, backwards = passes(0, Op.FORWARD, range(4)), passes(0, Op.FULL_BACKWARD, range(4))
    >>> CodedRow([*turns(2, forwards), *turns(2, forwards, backwards), *backwards])
    (0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3)
    """
    return chain.from_iterable(zip(*(islice(stream, rounds) for stream in streams), strict=False))


def with_late_weights(
    total: int,
    forwards: Iterator[int],
    inputs: Iterator[int],
    weights: Iterator[int],
    *,
    warm_up: int,
    delay: int,
) -> Iterator[int]:
    """Return the codes of a rank: `warm_up` forwards, then 1F1B with weight gradients `delay` input gradients behind.

    warm_up=2, delay=1, total=4      F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    """
    warm_up, delay = min(warm_up, total), min(delay, total)
    steady = total - warm_up
    ahead = min(delay, steady)  # input gradients that run ahead while there are forwards
    return chain(
        turns(warm_up, forwards),
        turns(ahead, inputs, forwards),
        turns(steady - ahead, inputs, weights, forwards),
        turns(delay - ahead, inputs),
        turns(total, inputs, weights),
        weights,
    )


def rounds_of(ranks: int, microbatches: int) -> tuple[range, ...]:
    """Divide the microbatches into rounds of about one per rank, as evenly as possible.

    The larger rounds come first: the warm-up is as long as the first round, and must be long enough for all.

    >>> rounds_of(ranks=4, microbatches=8), rounds_of(ranks=4, microbatches=9)
    ((range(0, 4), range(4, 8)), (range(0, 5), range(5, 9)))
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return tuple(map(range, starts, starts[1:]))


def through_chunks(stages: Iterable[int], op: Op, rounds: Iterable[range]) -> Iterator[int]:
    """Return a rank's passes of one kind: each round through all of its stages, in the given order.

    >>> from pipecut.schedule.action import CodedRow
    >>> CodedRow(through_chunks([0, 2], Op.FORWARD, rounds_of(ranks=2, microbatches=4)))
    (0F0, 0F1, 2F0, 2F1, 0F2, 0F3, 2F2, 2F3)
    """
    order = tuple(stages)
    return chain.from_iterable(passes(stage, op, together) for together in rounds for stage in order)


# Fill the idle slots of a plan with passes that can run then, within a limit on the activations of a rank.
#
# The ranks go through the plan in slots of one pass each. A rank whose next pass waits for another rank takes the
# first of its later passes that does not, provided that it never holds more activations than allowed: neither now nor
# until the place that the pass came from. Only idle slots are used, so nothing comes later than before. Done from the
# end of a plan to its start, the same moves passes as late as they can be.


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
                f"The plan '{plan.name}' cannot run: no rank can proceed at slot {now}. "
                "Call plan.validate() for the reason."
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
