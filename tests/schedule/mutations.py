"""Random changes to a plan, which may or may not keep it from running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from pipecut.schedule.action import Action, Op, overlap, transfer
from pipecut.schedule.plan import Plan
from tests.schedule.random_plans import Rows


def mutated(random: Random, plan: Plan) -> Plan:
    """The plan with one random change, which may or may not keep it from running."""
    rows: Rows = [list(row) for row in plan.actions]
    random.choice(MUTATIONS)(random, rows, plan)
    return plan.with_actions(rows)


def _place(random: Random, rows: Rows, among: Callable[[Action], bool] = lambda action: True) -> tuple[int, int] | None:
    """The rank and step of a random action."""
    places = [(r, s) for r, row in enumerate(rows) for s, a in enumerate(row) if a is not None and among(a)]
    return random.choice(places) if places else None


def drop(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows):
        del rows[place[0]][place[1]]


def duplicate(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows):
        rank, step = place
        rows[rank].insert(random.choice([step, random.randint(0, len(rows[rank]))]), rows[rank][step])


def swap_neighbours(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows):
        rank, step = place
        if step + 1 < len(rows[rank]):
            rows[rank][step : step + 2] = reversed(rows[rank][step : step + 2])


def swap_any(random: Random, rows: Rows, plan: Plan) -> None:
    one, two = _place(random, rows), _place(random, rows)
    if one and two:
        (r, s), (q, t) = one, two
        rows[r][s], rows[q][t] = rows[q][t], rows[r][s]


def swap_in_rank(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows):
        rank, step = place
        other = random.randrange(len(rows[rank]))
        rows[rank][step], rows[rank][other] = rows[rank][other], rows[rank][step]


def move_within(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows):
        rank, step = place
        action = rows[rank].pop(step)
        rows[rank].insert(max(0, step + random.randint(-4, 4)), action)


def move_across(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows):
        action = rows[place[0]].pop(place[1])
        target = random.choice(rows)
        target.insert(random.randint(0, len(target)), action)


def retarget(random: Random, rows: Rows, plan: Plan) -> None:
    """Another stage, microbatch, peer or op; sometimes one that does not exist."""
    place = _place(random, rows)
    if place is None:
        return
    rank, step = place
    action = rows[rank][step]
    assert action is not None
    if action.parts:
        part = random.randrange(len(action.parts))
        parts = list(action.parts)
        parts[part] = _retargeted(random, parts[part], plan)
        rows[rank][step] = overlap(*parts)
    else:
        rows[rank][step] = _retargeted(random, action, plan)


def _retargeted(random: Random, action: Action, plan: Plan) -> Action:
    stage = random.randint(-1, plan.stages)
    number: int | None = random.choice([None, *range(-1, plan.microbatches + 1)])
    op = random.choice([op for op in Op if op is not Op.OVERLAP_F_B])
    choice = random.choice(["stage", "microbatch", "peer", "op", "op and form"])
    if choice == "stage":
        return action._replace(stage=stage)
    if choice == "microbatch":
        return action._replace(microbatch=number)
    if choice == "peer":
        peer = random.choice([None, *range(-1, plan.stages + 1)])
        if peer is None or not action.is_transfer:
            return action._replace(peer=peer)
        return transfer(action.op, action.stage, action.microbatch, peer)
    if choice == "op":
        return action._replace(op=op)
    whole = op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)
    return Action(action.stage, op, None if whole else (action.microbatch or 0))


def drop_message(random: Random, rows: Rows, plan: Plan) -> None:
    """Both ends of one message."""
    if place := _place(random, rows, lambda action: action.is_transfer):
        action = rows[place[0]][place[1]]
        assert action is not None
        gone = (action, action.counterpart)
        rows[:] = [[kept for kept in row if kept not in gone] for row in rows]


def swap_messages(random: Random, rows: Rows, plan: Plan) -> None:
    """Both ends of two messages: the order stays the same at both ends."""
    one = _place(random, rows, lambda action: action.is_transfer)
    two = _place(random, rows, lambda action: action.is_transfer)
    if one is None or two is None:
        return
    first, second = rows[one[0]][one[1]], rows[two[0]][two[1]]
    assert first is not None
    assert second is not None
    other = {first: second, second: first, first.counterpart: second.counterpart, second.counterpart: first.counterpart}
    rows[:] = [[other.get(action, action) if action is not None else None for action in row] for row in rows]


def drop_all_of_a_kind(random: Random, rows: Rows, plan: Plan) -> None:
    kinds: list[Callable[[Action], bool]] = [
        lambda action: action.is_transfer,
        lambda action: action.op in (Op.UNSHARD, Op.RESHARD),
        lambda action: action.op is Op.REDUCE_TIES,
        lambda action: action.op is Op.REDUCE_GRAD,
        lambda action: action.microbatch == 0,
        lambda action: action.stage == plan.stages - 1,
    ]
    kind = random.choice(kinds)
    rows[:] = [[action for action in row if action is None or not kind(action)] for row in rows]


def split_backward(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows, lambda action: action.op is Op.FULL_BACKWARD):
        rank, step = place
        action = rows[rank][step]
        assert action is not None
        halves = [action._replace(op=op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
        rows[rank][step : step + 1] = halves


def overlap_neighbours(random: Random, rows: Rows, plan: Plan) -> None:
    """A few neighbours become one overlap; now and then of actions that cannot be overlapped."""
    anything = random.random() < 0.2
    if place := _place(random, rows, lambda action: anything or action.is_compute):
        rank, step = place
        neighbours = []
        for action in rows[rank][step : step + random.randint(1, 3)]:
            if action is None or not (anything or action.is_compute):
                break
            neighbours.append(action)
        rows[rank][step : step + len(neighbours)] = [
            overlap(*(leaf for action in neighbours for leaf in action.leaves))
        ]


def take_apart(random: Random, rows: Rows, plan: Plan) -> None:
    if place := _place(random, rows, lambda action: bool(action.parts)):
        rank, step = place
        action = rows[rank][step]
        assert action is not None
        parts = list(action.parts)
        if random.random() < 0.5:
            rows[rank][step : step + 1] = parts
        else:
            random.shuffle(parts)
            rows[rank][step] = overlap(*parts[: random.randint(0, len(parts))])


def insert(random: Random, rows: Rows, plan: Plan) -> None:
    """Something harmless or not: a bubble, an UNSHARD, a RESHARD, a REDUCE_GRAD, a REDUCE_TIES."""
    stage = random.randrange(plan.stages)
    rank = plan.placement.rank_of[stage]
    op = random.choice([Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD])
    new = random.choice([None, Action(stage, op), Action(stage, Op.REDUCE_TIES, random.randint(0, 1))])
    rows[rank].insert(random.choice([random.randint(0, len(rows[rank])), len(rows[rank])]), new)


def sum_through_another_stage(random: Random, rows: Rows, plan: Plan) -> None:
    """A REDUCE_TIES that names another stage, which may or may not hold the tie."""
    if place := _place(random, rows, lambda action: action.op is Op.REDUCE_TIES):
        rank, step = place
        action = rows[rank][step]
        assert action is not None
        rows[rank][step] = action._replace(stage=random.choice(plan.placement.stages_of[rank] or (0,)))


def move_sum(random: Random, rows: Rows, plan: Plan) -> None:
    """A REDUCE_TIES to where its rank meets another one."""
    if place := _place(random, rows, lambda action: action.op is Op.REDUCE_TIES):
        rank, step = place
        row = rows[rank]
        meetings = [at for at, a in enumerate(row) if a is not None and (a.is_transfer or a.op is Op.REDUCE_TIES)]
        target = random.choice(meetings[-5:])
        row.insert(target, row.pop(step))


def swap_ranks(random: Random, rows: Rows, plan: Plan) -> None:
    one, two = random.randrange(len(rows)), random.randrange(len(rows))
    rows[one], rows[two] = rows[two], rows[one]


MUTATIONS: list[Callable[[Random, Rows, Plan], None]] = [
    *[drop, duplicate, swap_neighbours, swap_any, swap_in_rank, move_within, move_across, retarget] * 3,
    *[swap_neighbours, move_within] * 3,
    *[drop_message, swap_messages, drop_all_of_a_kind, split_backward, overlap_neighbours, take_apart, insert],
    *[insert, move_sum, move_sum, sum_through_another_stage, swap_ranks],
]


def with_other_flags(random: Random, plan: Plan) -> Plan:
    """The plan as it would be read for another purpose: training or not, another number of microbatches."""
    if random.random() < 0.5:
        return replace(plan, training=not plan.training)
    return replace(plan, microbatches=plan.microbatches + 1)
