"""Plans executed in one process: a worker for each rank, channels without buffers, values checked when they are used.

This is a second statement of what a plan means. It takes nothing from pipecut but the fields of a plan, so that a
mistake in pipecut's own rules does not hide itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from pipecut.schedule.action import Action
from pipecut.schedule.plan import Plan

RAN = "ran"
STUCK = "stuck"

Value = tuple[object, ...]  # ("activation", maker, microbatch), ("arrived", kind, from stage, to stage, microbatch)...


class ExecutionError(Exception):
    """An action that cannot be done."""


@dataclass(frozen=True)
class Meeting:
    """A rank goes on when all these ranks are at the same meeting: a message or the sum of a tie."""

    about: Value
    ranks: frozenset[int]


@dataclass(frozen=True)
class Inputs:
    """A rank goes on when these values exist on other ranks (in plans without transfers)."""

    values: tuple[Value, ...]


Request = Meeting | Inputs | None  # None: an action is done, somebody may wait for it
Steps = Generator[Request, None, None]


def runs(plan: Plan) -> bool:
    """Whether a plan comes to its end with everything done."""
    return execute(plan) == RAN


def execute(plan: Plan) -> str:
    """Run a plan with workers that take turns: "ran", or why not. The same in every run."""
    work = Execution(plan)
    workers = [work.rank(rank) for rank in range(len(plan.actions))]
    at: dict[int, Request] = dict.fromkeys(range(len(workers)))

    def go_on(rank: int) -> None:
        try:
            at[rank] = next(workers[rank])
        except StopIteration:
            del at[rank]

    try:
        moved = True
        while at and moved:
            moved = False
            for rank in sorted(at):
                request = at.get(rank)
                if rank not in at:
                    continue
                if request is None or (isinstance(request, Inputs) and work.exist(request.values)):
                    go_on(rank)
                    moved = True
                elif isinstance(request, Meeting) and all(at.get(other) == request for other in request.ranks):
                    for other in sorted(request.ranks):
                        go_on(other)
                    moved = True
        if at:
            return f"{STUCK} at {at}"
        work.check_complete()
    except ExecutionError as failure:
        return str(failure)
    return RAN


@dataclass
class Execution:
    """The values and the duties of all ranks while a plan runs."""

    plan: Plan
    made: list[set[Value]] = field(init=False)  # what is on each rank
    everywhere: set[Value] = field(default_factory=set)
    unsharded: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.made = [set() for _ in self.plan.actions]
        self.rank_of = self.plan.placement.rank_of
        every = [action for row in self.plan.actions for action in row if action is not None]
        self.ops = {str(action.op) for action in every}
        self.by_message = bool(self.ops & {"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
        self.sharded = {action.stage for action in every if str(action.op) in ("UNSHARD", "RESHARD")}

    def exist(self, values: tuple[Value, ...]) -> bool:
        """Whether values have been made on any rank."""
        return all(value in self.everywhere for value in values)

    def rank(self, rank: int) -> Steps:
        """What one rank does, step by step."""
        for action in self.plan.actions[rank]:
            if action is not None:
                self._demand(str(action.op) in HANDLERS, f"{action} is unknown")
                yield from HANDLERS[str(action.op)](self, rank, action)
            yield None

    # ------------------------------------------------------------------------------------------------- computations

    def overlap(self, rank: int, action: Action) -> Steps:
        """All parts, one after the other; what they need of other ranks must be there before the first begins."""
        self._demand(len(action.parts) > 0, f"{action} has no parts")
        for part in action.parts:
            self._demand(str(part.op) in COMPUTATIONS, f"{part} cannot be overlapped")
        yield from self._compute(rank, action.parts)

    def computation(self, rank: int, action: Action) -> Steps:
        """A forward or a backward."""
        self._demand(action.parts == (), f"{action} has parts")
        yield from self._compute(rank, (action,))

    def _compute(self, rank: int, leaves: tuple[Action, ...]) -> Steps:
        for leaf in leaves:
            self._belongs(rank, leaf, numbered=True)
            self._demand(leaf.peer is None, f"{leaf} has a peer")
            self._demand(self.plan.training or str(leaf.op) == "F", f"{leaf} in a plan that is forward only")
        if not self.by_message:
            yield Inputs(tuple(v for leaf in leaves for v in self._inputs(leaf) if self._maker_rank(v) != rank))
        for leaf in leaves:
            self._demand(leaf.stage not in self.sharded or leaf.stage in self.unsharded, f"{leaf} on a sharded stage")
            for value in self._inputs(leaf):
                there = self.everywhere if self._maker_rank(value) != rank and not self.by_message else self.made[rank]
                self._demand(value in there, f"{leaf} lacks {value}")
            self._check_not_reduced(rank, leaf)
            for kind in COMPUTATIONS[str(leaf.op)]:
                self._make(rank, (kind, leaf.stage, leaf.microbatch), leaf)

    def _inputs(self, leaf: Action) -> Iterator[Value]:
        stage, microbatch = leaf.stage, leaf.microbatch
        flow = self.plan.dataflow
        if str(leaf.op) == "F":
            for maker, user in flow.activations:
                if user == stage:
                    yield self._here_or_arrived("activation", maker, stage, microbatch)
            if stage in flow.root_inputs and self.by_message and self.rank_of[0] != self.rank_of[stage]:
                yield "arrived", "activation", 0, stage, microbatch
        elif str(leaf.op) == "W":
            yield "gradient", stage, microbatch
        else:
            yield "activation", stage, microbatch
            for maker, user in flow.gradients:
                if maker == stage:
                    yield self._here_or_arrived("gradient", user, stage, microbatch)

    def _here_or_arrived(self, kind: str, source: int, target: int, microbatch: int | None) -> Value:
        if self.by_message and self.rank_of[source] != self.rank_of[target]:
            return "arrived", kind, source, target, microbatch
        return kind, source, microbatch

    def _maker_rank(self, value: Value) -> int:
        stage = value[3] if value[0] == "arrived" else value[1]
        assert isinstance(stage, int)
        return self.rank_of[stage]

    def _check_not_reduced(self, rank: int, leaf: Action) -> None:
        """The sum of a stage's gradients ends its step: nothing of the stage may come after it."""
        self._demand(("reduced", leaf.stage) not in self.made[rank], f"{leaf} after REDUCE_GRAD")
        for number, holders in enumerate(self.plan.dataflow.ties):
            late = leaf.stage in holders and ("summed", number) in self.made[rank]
            self._demand(not late, f"{leaf} after REDUCE_TIES{number}")

    # ----------------------------------------------------------------------------------------------------- messages

    def send(self, rank: int, action: Action) -> Steps:
        """One value to another rank, which must take it before this one goes on."""
        kind, source, target = self._edge(rank, action)
        made_by_stage = kind == "gradient" or (source, target) in self.plan.dataflow.activations
        if made_by_stage:  # otherwise it is an input of the model, which is there from the start
            self._demand((kind, source, action.microbatch) in self.made[rank], f"{action} has nothing to send")
        self._make(rank, ("sent", kind, source, target, action.microbatch), action)
        yield self._message(kind, source, target, action)

    def receive(self, rank: int, action: Action) -> Steps:
        """The other end of a send."""
        kind, target, source = self._edge(rank, action)
        yield self._message(kind, source, target, action)
        self._make(rank, ("arrived", kind, source, target, action.microbatch), action)

    def _message(self, kind: str, source: int, target: int, action: Action) -> Meeting:
        about = ("message", kind, source, target, action.microbatch)
        return Meeting(about, frozenset({self.rank_of[source], self.rank_of[target]}))

    def _edge(self, rank: int, action: Action) -> tuple[str, int, int]:
        """(kind, the stage of the action, the stage at the other end)."""
        self._belongs(rank, action, numbered=True)
        kind, neighbour = TRANSFERS[str(action.op)]
        here, there = action.stage, action.stage + neighbour if action.peer is None else action.peer
        self._demand(0 <= there < self.plan.stages, f"{action} goes to an unknown stage")
        self._demand(self.rank_of[here] != self.rank_of[there], f"{action} is between stages of one rank")
        source, target = (here, there) if str(action.op).startswith("SEND") else (there, here)
        flow = self.plan.dataflow
        is_edge = {
            "activation": (source, target) in flow.activations or (source == 0 and target in flow.root_inputs),
            "gradient": (target, source) in flow.gradients,
        }[kind]
        self._demand(is_edge, f"{action} is no edge of the dataflow")
        return kind, here, there

    # ------------------------------------------------------------------------------------------------------- upkeep

    def unshard(self, rank: int, action: Action) -> Steps:
        """Gather the parameters of a stage."""
        self._belongs(rank, action, numbered=False)
        self.unsharded.add(action.stage)
        yield from ()

    def reshard(self, rank: int, action: Action) -> Steps:
        """Free the parameters of a stage."""
        self._belongs(rank, action, numbered=False)
        self.unsharded.discard(action.stage)
        yield from ()

    def reduce_grad(self, rank: int, action: Action) -> Steps:
        """Sum the gradients of a stage among its replicas: once, with all of them in."""
        self._belongs(rank, action, numbered=False)
        self._make(rank, ("reduced", action.stage), action)
        yield from ()

    def reduce_ties(self, rank: int, action: Action) -> Steps:
        """Sum the gradient of a shared parameter on all ranks that hold it."""
        ties, number = self.plan.dataflow.ties, action.microbatch
        self._demand(number is not None and 0 <= number < len(ties), f"{action} is no tie")
        assert number is not None
        self._demand(action.stage in ties[number], f"stage {action.stage} does not hold tie {number}")
        self._demand(self.rank_of[action.stage] == rank, f"{action} is on the wrong rank")
        self._demand(action.peer is None and action.parts == (), f"{action} is malformed")
        holders = frozenset(self.rank_of[stage] for stage in ties[number])
        yield Meeting(("tie", number), holders)
        if len(holders) > 1:
            self._make(rank, ("summed", number), action)
        else:
            self.made[rank].add(("summed", number))

    # ------------------------------------------------------------------------------------------------------- common

    def _make(self, rank: int, value: Value, action: Action) -> None:
        self._demand(value not in self.made[rank], f"{action} makes {value} a second time")
        self.made[rank].add(value)
        self.everywhere.add(value)

    def _belongs(self, rank: int, action: Action, *, numbered: bool) -> None:
        """A stage of this rank; a microbatch of the plan, or none where there must be none."""
        self._demand(0 <= action.stage < self.plan.stages, f"{action} names an unknown stage")
        self._demand(self.rank_of[action.stage] == rank, f"{action} is on the wrong rank")
        if numbered:
            known = action.microbatch is not None and 0 <= action.microbatch < self.plan.microbatches
            self._demand(known, f"{action} names an unknown microbatch")
        else:
            self._demand(action[2:] == (None, None, ()), f"{action} is malformed")

    def _demand(self, condition: bool, reason: str) -> None:
        if not condition:
            raise ExecutionError(reason)

    def check_complete(self) -> None:
        """Everything that one step of training, or of forward only, consists of has been done."""
        for value in self._duties():
            self._demand(value in self.everywhere, f"{value} was never made")

    def _duties(self) -> Iterator[Value]:
        flow, training = self.plan.dataflow, self.plan.training
        for microbatch in range(self.plan.microbatches):
            for stage in range(self.plan.stages):
                for kind in ("activation", "gradient", "weight gradient") if training else ("activation",):
                    yield kind, stage, microbatch
            if self.by_message:
                edges = {("activation", *edge) for edge in flow.activations}
                edges |= {("activation", 0, stage) for stage in flow.root_inputs}
                edges |= {("gradient", user, maker) for maker, user in flow.gradients if training}
                for kind, source, target in edges:
                    if self.rank_of[source] != self.rank_of[target]:
                        yield "arrived", kind, source, target, microbatch
        if "REDUCE_GRAD" in self.ops:
            for stage in range(self.plan.stages):
                yield "reduced", stage
        if "REDUCE_TIES" in self.ops:
            for number, holders in enumerate(flow.ties):
                if len({self.rank_of[stage] for stage in holders}) > 1:
                    yield "summed", number


COMPUTATIONS = {
    "F": ("activation",),
    "I": ("gradient",),
    "W": ("weight gradient",),
    "B": ("gradient", "weight gradient"),
}
TRANSFERS = {
    "SEND_F": ("activation", 1),
    "RECV_F": ("activation", -1),
    "SEND_B": ("gradient", -1),
    "RECV_B": ("gradient", 1),
}
HANDLERS: dict[str, Callable[[Execution, int, Action], Steps]] = {
    **dict.fromkeys(COMPUTATIONS, Execution.computation),
    "OVERLAP_F_B": Execution.overlap,
    "SEND_F": Execution.send,
    "SEND_B": Execution.send,
    "RECV_F": Execution.receive,
    "RECV_B": Execution.receive,
    "UNSHARD": Execution.unshard,
    "RESHARD": Execution.reshard,
    "REDUCE_GRAD": Execution.reduce_grad,
    "REDUCE_TIES": Execution.reduce_ties,
}
