"""Check each rank by itself: known actions, each exactly once, each after its needs; sharding and reductions too."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..action import BACKWARD, NEIGHBOUR, SENDS, TRANSFERS, Action, Op, transfer
from ..plan import Plan
from ..rules import GIVES, dependencies
from ..walk import Entry, Key, Ledger


@dataclass(frozen=True)
class Fault:
    """One reason why a plan cannot run. For an action that is missing, `slot` is the end of the rank's row.

    With `cause` False there is nothing wrong with the action itself: it waits for one that cannot run.
    """

    rank: int
    slot: int
    action: Action
    problem: str
    cause: bool = True

    def __str__(self) -> str:
        return f"rank {self.rank}, slot {self.slot}, {self.action}: {self.problem}"


_NO_PART = "cannot be part of an overlap; give it a slot of its own"


@dataclass
class PlanReading:
    """The findings of the first reading of a plan, for the checks after it."""

    plan: Plan
    ledger: Ledger = field(init=False)
    known: bool = True  # False: some action has a stage, a microbatch or a rank that does not exist
    computed: list[list[int]] = field(init=False)  # by stage: the slots in which it computes
    # By rank: the actions for a whole stage or a tie, with their slots.
    whole_stage: list[list[tuple[int, Action]]] = field(init=False)
    # By rank, in order: the number of each message (for a tie -1 - its number), its other rank, and its slot.
    messages: list[list[int]] = field(init=False)
    message_peers: list[list[int]] = field(init=False)
    message_slots: list[list[int]] = field(init=False)

    _first_slots: dict[int, dict[Action, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.plan, local=True)
        self.computed = [[] for _ in range(self.plan.stages)]
        self.whole_stage = [[] for _ in self.plan.actions]
        self.messages = [[] for _ in self.plan.actions]
        self.message_peers = [[] for _ in self.plan.actions]
        self.message_slots = [[] for _ in self.plan.actions]

    def first_slot(self, rank: int, wanted: Action) -> int | None:
        """Return the first slot in which a rank does an action, or one that gives the same; indexed on first use."""
        if rank not in self._first_slots:
            slots = self._first_slots[rank] = {}
            for slot, action in enumerate(self.plan.actions[rank]):
                for leaf in action.leaves if action is not None else ():
                    for given in (leaf.op, *GIVES.get(leaf.op, ())):
                        slots.setdefault(leaf._replace(op=given), slot)
        return self._first_slots[rank].get(wanted)

    def entries(self) -> list[dict[Key, Entry]]:
        """Return the entries of the ledger by the rank that may do them."""
        by_rank: list[dict[Key, Entry]] = [{} for _ in self.plan.actions]
        for key, entry in self.ledger.entries.items():
            if self.plan.training or key[0] not in BACKWARD:
                by_rank[self.plan.placement.rank_of[key[1]]][key] = entry
        return by_rank


def order_faults(plan: Plan, reading: PlanReading) -> list[Fault]:
    """Read every rank's actions once, and return a fault for each that is unknown, double, too early, or missing."""
    faults: list[Fault] = []
    done, computed, microbatches = reading.ledger.done, reading.computed, plan.microbatches
    entries = reading.entries()
    for rank, row in enumerate(plan.actions):
        entry_of = entries[rank].get
        messages, peers, slots = reading.messages[rank], reading.message_peers[rank], reading.message_slots[rank]
        for slot, action in enumerate(row):
            if action is None:
                continue
            for leaf in action.parts or (action,):
                stage, op, microbatch, peer, _ = leaf
                entry = entry_of((op, stage, peer))
                if entry is None or microbatch is None or not 0 <= microbatch < microbatches:
                    faults += _set_apart(plan, reading, rank, slot, leaf, action)
                    continue
                needs, fills, message, other_rank = entry
                if message >= 0 and leaf is not action:
                    reading.known = False
                    faults.append(Fault(rank, slot, action, f"{leaf} {_NO_PART}"))
                    continue
                for offset in needs:
                    if not done[offset + microbatch]:
                        faults += _too_early(reading, rank, slot, leaf)
                        break
                for offset in fills:
                    if done[offset + microbatch]:
                        faults.append(_twice(reading, rank, slot, leaf))
                        break
                    done[offset + microbatch] = 1
                if message < 0:
                    computed[stage].append(slot)
                else:
                    messages.append(message + microbatch)
                    peers.append(other_rank)
                    slots.append(slot)
    return faults + _missing(plan, reading.ledger)


def _set_apart(plan: Plan, reading: PlanReading, rank: int, slot: int, leaf: Action, action: Action) -> list[Fault]:
    """Put an action for a whole stage or a tie aside for its own check; any other is a fault."""
    problem = _unknown(plan, rank, leaf)
    if not problem and action.parts:
        problem = f"{leaf} {_NO_PART}"
    if problem:
        reading.known = False
        return [Fault(rank, slot, leaf, problem)]
    reading.whole_stage[rank].append((slot, leaf))
    if leaf.op is Op.REDUCE_TIES:
        reading.messages[rank].append(-1 - (leaf.microbatch or 0))
        reading.message_peers[rank].append(-1)
        reading.message_slots[rank].append(slot)
    return []


def _unknown(plan: Plan, rank: int, leaf: Action) -> str:
    """Return the reason why an action does not belong to this plan; empty if it is one for a whole stage."""
    stage, op, microbatch = leaf.stage, leaf.op, leaf.microbatch
    rank_of = plan.placement.rank_of
    if op is Op.OVERLAP_F_B:
        return "an overlap needs parts, as in (1F1;2B0)OVERLAP_F_B"
    if leaf.peer is not None and op not in TRANSFERS:
        return f"{op} has no peer; leave it out"
    if not 0 <= stage < plan.stages:
        return f"there is no stage {stage}; the stages are 0 to {plan.stages - 1}"
    if rank_of[stage] != rank:
        return f"stage {stage} is on rank {rank_of[stage]}; move the action there"
    if op is Op.REDUCE_TIES:
        known = plan.dataflow.has_tie(microbatch, stage)
        return "" if known else f"stage {stage} has no tie {microbatch}; give the plan a dataflow with its ties"
    if op in BACKWARD and not plan.training:
        return "the plan is forward only; remove it, or make the plan with training=True"
    if op not in GIVES and op not in TRANSFERS:
        return "" if microbatch is None else f"{op} is for a whole stage; leave the microbatch out"
    if microbatch is None:
        return f"needs the number of a microbatch, as in {leaf._replace(microbatch=0)}"
    if not 0 <= microbatch < plan.microbatches:
        return f"there is no microbatch {microbatch}; the microbatches are 0 to {plan.microbatches - 1}"
    return _not_an_edge(plan, leaf)


def _not_an_edge(plan: Plan, leaf: Action) -> str:
    other = leaf.other_stage
    if leaf.peer == leaf.stage + NEIGHBOUR[leaf.op]:
        return f"the neighbour is not named as a peer; write it {leaf._replace(peer=None)}"
    if not 0 <= other < plan.stages:
        return f"there is no stage {other} at the other end; the stages are 0 to {plan.stages - 1}"
    if plan.placement.rank_of[other] == plan.placement.rank_of[leaf.stage]:
        return f"stages {leaf.stage} and {other} are on the same rank, where nothing is sent; remove the transfer"
    maker, user = sorted((leaf.stage, other))
    what = "activation" if leaf.op in (Op.SEND_F, Op.RECV_F) else "gradient"
    return f"no {what} goes between stages {maker} and {user} that way; remove the transfer or add it to the dataflow"


def _too_early(reading: PlanReading, rank: int, slot: int, leaf: Action) -> list[Fault]:
    """Return a fault for each need that is not there yet, with its place."""
    plan, ledger = reading.plan, reading.ledger
    placement = plan.placement if plan.has_transfers else None
    faults = []
    for need in dependencies(leaf, plan.dataflow, placement):
        if plan.placement.rank_of[need.stage] != rank or (need.op in SENDS):
            continue
        if ledger.done[ledger.offset(*_offset_key(need)) + (need.microbatch or 0)]:
            continue
        later = reading.first_slot(rank, need)
        if later == slot:
            problem = f"needs {need}, a later part of the same overlap; put that first, or before the overlap"
        elif later is not None:
            problem = f"needs {plan.actions[rank][later]}, which comes after it, at slot {later}; put that before"
        else:
            problem = f"needs {need}, which is nowhere on this rank; add it before"
        faults.append(Fault(rank, slot, leaf, problem))
    return faults


def _offset_key(need: Action) -> tuple[Op, int, int | None]:
    return need.op, need.stage, need.other_stage if need.op in TRANSFERS else None


def _twice(reading: PlanReading, rank: int, slot: int, leaf: Action) -> Fault:
    firsts = [reading.first_slot(rank, leaf._replace(op=given)) for given in GIVES.get(leaf.op, (leaf.op,))]
    first = min(found for found in firsts if found is not None)
    done = f"done already by {reading.plan.actions[rank][first]} at slot {first}"
    return Fault(rank, slot, leaf, f"{done}; remove one of the two")


def _missing(plan: Plan, ledger: Ledger) -> list[Fault]:
    """Return a fault for each action of a whole training step that no rank does."""
    faults = []
    for (op, stage, other), offset in ledger.offsets.items():
        flags = ledger.done[offset : offset + plan.microbatches]
        if flags.count(1) == len(flags) or (op in BACKWARD and not plan.training):
            continue
        rank = plan.placement.rank_of[stage]
        for microbatch in (number for number, flag in enumerate(flags) if not flag):
            action = Action(stage, op, microbatch) if other is None else transfer(op, stage, microbatch, other)
            whole = _whole_backward(ledger, action)
            if whole is None:
                faults.append(Fault(rank, len(plan.actions[rank]), action, "is missing; add it"))
            elif op is Op.BACKWARD_INPUT:
                problem = f"is missing (or {stage}I{microbatch} and {stage}W{microbatch}); add it"
                faults.append(Fault(rank, len(plan.actions[rank]), whole, problem))
    return faults


def _whole_backward(ledger: Ledger, action: Action) -> Action | None:
    """Return the full backward if the plan has neither of its parts."""
    if action.op not in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
        return None
    parts = (ledger.offsets[op, action.stage, None] for op in GIVES[Op.FULL_BACKWARD])
    if any(ledger.done[offset + (action.microbatch or 0)] for offset in parts):
        return None
    return action._replace(op=Op.FULL_BACKWARD)


# Check sharding and reductions: parameters are gathered when used, gradients reduced once, after the last of them.


_REDUCTIONS = frozenset({Op.REDUCE_GRAD, Op.REDUCE_TIES})


def sharding_faults(plan: Plan, reading: PlanReading) -> list[Fault]:
    """Return the faults of UNSHARD, RESHARD, REDUCE_GRAD and REDUCE_TIES, on every rank."""
    if not any(reading.whole_stage):
        return []
    faults: list[Fault] = []
    for rank, whole_stage in enumerate(reading.whole_stage):
        faults += _use_of_sharded(plan, rank, whole_stage, reading)
        faults += _reductions_too_early(plan, rank, whole_stage, reading)
    return [*faults, *_reductions_missing(plan, reading)]


def _use_of_sharded(
    plan: Plan, rank: int, whole_stage: list[tuple[int, Action]], reading: PlanReading
) -> Iterator[Fault]:
    """Find computations between a RESHARD, or the start, and the next UNSHARD of their stage."""
    end = len(plan.actions[rank])
    sharded_since = {action.stage: 0 for _, action in whole_stage if action.op in (Op.UNSHARD, Op.RESHARD)}
    closing = [(end, Action(stage, Op.UNSHARD)) for stage in sharded_since]
    for slot, action in (*whole_stage, *closing):
        stage = action.stage
        if action.op is Op.RESHARD:
            sharded_since.setdefault(stage, slot)
        elif action.op is Op.UNSHARD and stage in sharded_since:
            slots = reading.computed[stage]
            for place in range(bisect_left(slots, sharded_since.pop(stage)), bisect_right(slots, slot)):
                used = plan.actions[rank][slots[place]]
                assert used is not None  # a slot at which a stage computes
                problem = f"stage {stage} is sharded here; put {stage}UNSHARD before it"
                yield Fault(rank, slots[place], used, problem)


def _reductions_too_early(
    plan: Plan, rank: int, whole_stage: list[tuple[int, Action]], reading: PlanReading
) -> Iterator[Fault]:
    for slot, action in whole_stage:
        for stage in _reduced(plan, rank, action):
            last = reading.computed[stage][-1] if reading.computed[stage] else -1
            if last > slot:
                problem = f"comes before {plan.actions[rank][last]} (slot {last}) of the stage; put it after the last"
                yield Fault(rank, slot, action, problem)


def _reduced(plan: Plan, rank: int, action: Action) -> list[int]:
    """Return the stages of the rank whose gradients an action sums."""
    if action.op is Op.REDUCE_GRAD:
        return [action.stage]
    if action.op is Op.REDUCE_TIES:
        holders = plan.dataflow.ties[action.microbatch or 0]
        return [stage for stage in sorted(holders) if plan.placement.rank_of[stage] == rank]
    return []


def _reductions_missing(plan: Plan, reading: PlanReading) -> Iterator[Fault]:
    """Find reductions that are missing or double: a plan that reduces anything reduces everything, once."""
    rank_of = plan.placement.rank_of
    there: dict[tuple[Op, int, int | None], list[int]] = {}
    for rank, whole_stage in enumerate(reading.whole_stage):
        for slot, action in whole_stage:
            if action.op in _REDUCTIONS:
                there.setdefault(_reduction(rank, action), []).append(slot)
    kinds = {op for op, _, _ in there}
    wanted: list[tuple[int, Action]] = []
    if Op.REDUCE_GRAD in kinds:
        wanted += [(rank_of[stage], Action(stage, Op.REDUCE_GRAD)) for stage in range(plan.stages)]
    if Op.REDUCE_TIES in kinds:
        for number, holders in enumerate(plan.dataflow.ties):
            first = {rank_of[stage]: stage for stage in sorted(holders, reverse=True)}
            if len(first) > 1:
                wanted += [(rank, Action(stage, Op.REDUCE_TIES, number)) for rank, stage in first.items()]
    for rank, action in wanted:
        slots = there.get(_reduction(rank, action), [])
        if not slots:
            problem = "is missing, while others have theirs; add it"
            yield Fault(rank, len(plan.actions[rank]), action, problem)
        for slot in slots[1:]:
            again = plan.actions[rank][slot] or action
            yield Fault(rank, slot, again, f"done already at slot {slots[0]}; remove one of the two")


def _reduction(rank: int, action: Action) -> tuple[Op, int, int | None]:
    """Name the reduction on a rank: the gradients of a stage, or a tie, whichever of its stages stands for it."""
    return action.op, rank, action.stage if action.op is Op.REDUCE_GRAD else action.microbatch
