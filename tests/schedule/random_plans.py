"""Random plans that run, made event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from pipecut.schedule import Placement
from pipecut.schedule.action import Action, Op, overlap, transfer
from pipecut.schedule.plan import Plan
from pipecut.schedule.rules import Dataflow

Name = tuple[object, ...]  # of an event: ("F", stage, microbatch), ("message", kind, source, target, microbatch)...
Rows = list[list[Action | None]]


@dataclass(frozen=True)
class Shape:
    """What kind of plan to make."""

    stages: int
    ranks: int
    microbatches: int
    training: bool = True
    transfers: bool = False
    upkeep: bool = False  # UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_TIES
    overlaps: bool = False
    straight: bool = False  # nothing but a chain


@dataclass
class Event:
    """What happens at one moment on one or more ranks, and what must have happened before."""

    actions: list[tuple[int, Action]]
    needs: set[Name] = field(default_factory=set)
    gives: tuple[Name, ...] = ()


def random_plan(random: Random, shape: Shape) -> Plan:
    """A plan that runs: every event comes after those that it needs, on all of its ranks at once."""
    placement = random_placement(random, shape.stages, shape.ranks)
    flow = Dataflow.chain(shape.stages) if shape.straight else random_dataflow(random, shape.stages)
    events = _computations(random, shape, placement, flow)
    if shape.transfers:
        _add_messages(shape, placement, flow, events)
    if shape.upkeep and shape.training:
        _add_reductions(random, shape, placement, flow, events)
    rows = _in_random_order(random, shape, placement, events)
    if shape.upkeep:
        rows = [_with_sharding(random, row, placement.stages_of[rank]) for rank, row in enumerate(rows)]
    if random.random() < 0.3:
        rows = [[cell for action in row for cell in ([None] * (random.random() < 0.2) + [action])] for row in rows]
    return Plan("random", placement, shape.microbatches, tuple(map(tuple, rows)), flow, shape.training)


def random_placement(random: Random, stages: int, ranks: int) -> Placement:
    """Any map of stages to ranks; now and then one with a rank that holds nothing."""
    rank_of = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
    random.shuffle(rank_of)
    if random.random() < 0.05:
        return Placement(tuple(rank + (rank >= ranks // 2) for rank in rank_of))
    return Placement(tuple(rank_of))


def random_dataflow(random: Random, stages: int) -> Dataflow:
    """A chain with holes, skips, gradients that stay out, inputs of the model, and ties."""
    pairs = [(maker, user) for maker in range(stages) for user in range(maker + 1, stages)]
    activations = {(maker, user) for maker, user in pairs if random.random() < (0.9 if user == maker + 1 else 0.2)}
    gradients = {edge for edge in activations if random.random() < 0.85}
    ties = [
        frozenset(random.sample(range(stages), random.randint(1, min(stages, 3))))
        for _ in range(random.choice([0, 1, 2, 3]))
    ]
    roots = {stage for stage in range(stages) if random.random() < 0.25}
    return Dataflow(stages, frozenset(activations), frozenset(gradients), frozenset(roots), tuple(ties))


def _computations(random: Random, shape: Shape, placement: Placement, flow: Dataflow) -> list[Event]:
    events = []
    for stage in range(shape.stages):
        rank = placement.rank_of[stage]
        for microbatch in range(shape.microbatches):
            forward: Name = ("F", stage, microbatch)
            makers = {("F", maker, microbatch) for maker, user in flow.activations if user == stage}
            events.append(Event([(rank, Action(stage, Op.FORWARD, microbatch))], set(makers), (forward,)))
            if not shape.training:
                continue
            givers: set[Name] = {("I", user, microbatch) for maker, user in flow.gradients if maker == stage}
            inputs, weights = ("I", stage, microbatch), ("W", stage, microbatch)
            if random.random() < 0.5:
                both = Action(stage, Op.FULL_BACKWARD, microbatch)
                events.append(Event([(rank, both)], givers | {forward}, (inputs, weights)))
            else:
                first, second = (Action(stage, op, microbatch) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
                events.append(Event([(rank, first)], givers | {forward}, (inputs,)))
                events.append(Event([(rank, second)], {inputs}, (weights,)))
    return events


def _add_messages(shape: Shape, placement: Placement, flow: Dataflow, events: list[Event]) -> None:
    """Make every message an event of its own, between what makes the value and what uses it."""
    computed = list(events)
    rank_of = placement.rank_of
    edges = {("F", maker, user) for maker, user in flow.activations} | {("F", 0, user) for user in flow.root_inputs}
    if shape.training:
        edges |= {("I", user, maker) for maker, user in flow.gradients}
    for kind, source, target in sorted(edges):
        if rank_of[source] == rank_of[target]:
            continue
        send, receive = (Op.SEND_F, Op.RECV_F) if kind == "F" else (Op.SEND_B, Op.RECV_B)
        computes = kind == "I" or (source, target) in flow.activations
        users = {Op.FORWARD} if kind == "F" else {Op.BACKWARD_INPUT, Op.FULL_BACKWARD}
        for microbatch in range(shape.microbatches):
            value: Name = (kind, source, microbatch)
            message: Name = ("message", kind, source, target, microbatch)
            ends = [
                (rank_of[source], transfer(send, source, microbatch, target)),
                (rank_of[target], transfer(receive, target, microbatch, source)),
            ]
            events.append(Event(ends, {value} if computes else set(), (message,)))
            for event in computed:
                stage, op, number, _, _ = event.actions[0][1]
                if (stage, number) == (target, microbatch) and op in users:
                    event.needs = event.needs - {value} | {message}


def _add_reductions(random: Random, shape: Shape, placement: Placement, flow: Dataflow, events: list[Event]) -> None:
    rank_of = placement.rank_of
    everything: dict[int, set[Name]] = {
        stage: {("W", stage, number) for number in range(shape.microbatches)} for stage in range(shape.stages)
    }
    if random.random() < 0.6:
        for stage, needs in everything.items():
            events.append(Event([(rank_of[stage], Action(stage, Op.REDUCE_GRAD))], set(needs), (("reduced", stage),)))
    if random.random() < 0.8:
        for number, holders in enumerate(flow.ties):
            by_rank: dict[int, list[int]] = {}
            for stage in holders:
                by_rank.setdefault(rank_of[stage], []).append(stage)
            if len(by_rank) > 1 or random.random() < 0.3:
                ends = [
                    (rank, Action(random.choice(stages), Op.REDUCE_TIES, number)) for rank, stages in by_rank.items()
                ]
                before: set[Name] = set().union(*(everything[stage] for stage in holders))
                events.append(Event(ends, before, (("summed", number),)))


def _in_random_order(random: Random, shape: Shape, placement: Placement, events: list[Event]) -> Rows:
    rows: Rows = [[] for _ in range(placement.ranks)]
    done: set[Name] = set()
    waiting = list(events)
    eager = random.random() < 0.5  # early in the list first: a plan that looks like a schedule
    while waiting:
        ready = [event for event in waiting if event.needs <= done]
        first = (
            ready[min(random.randrange(len(ready)), random.randrange(len(ready)))] if eager else random.choice(ready)
        )
        waiting.remove(first)
        done.update(first.gives)
        together = [first]
        if shape.overlaps and first.actions[0][1].is_compute and random.random() < 0.5:
            rank = first.actions[0][0]
            alike = [e for e in waiting if e.actions[0][0] == rank and e.actions[0][1].is_compute and e.needs <= done]
            for other in random.sample(alike, min(len(alike), random.choice([1, 1, 2]))):
                waiting.remove(other)
                done.update(other.gives)
                together.append(other)
        if len(together) > 1:
            rows[first.actions[0][0]].append(overlap(*(event.actions[0][1] for event in together)))
            continue
        for rank, action in first.actions:
            rows[rank].append(action)
    return rows


def _with_sharding(random: Random, row: Sequence[Action | None], stages: Sequence[int]) -> list[Action | None]:
    """UNSHARD before a use and RESHARD now and then, for some of the stages; some of them for nothing."""
    managed = {stage for stage in stages if random.random() < 0.5}
    held: set[int] = set()
    result: list[Action | None] = []
    for action in row:
        for leaf in action.leaves if action is not None and action.is_compute else ():
            if leaf.stage in managed and (leaf.stage not in held or random.random() < 0.1):
                result.append(Action(leaf.stage, Op.UNSHARD))
                held.add(leaf.stage)
        result.append(action)
        for stage in sorted(managed):
            if random.random() < 0.15:
                result.append(Action(stage, Op.RESHARD))
                held.discard(stage)
    return result
