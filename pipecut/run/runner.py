"""Runs the actions of a plan: those of this rank, or those of all ranks in one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..errors import PipeWarning, StepError
from ..schedule import RECEIVES, Action, Op, Plan, Span, Walk
from ..torch_internals import profiler_is_on
from .executor import Executor, Handler, finish_together
from .failure import BEGIN, END, Alarm, Failure, describe, step_error
from .loss import WAYS, Objective
from .state import Batch
from .transport.base import Meta
from .transport.in_process import PostOffice

# MERGED: Whether a step trains, found out in its first forwards: without a loss_fn that is up to what the model
# MERGED: returns.
# MERGED:
# MERGED: The rank of the last stage sees the output, and no backward can have begun anywhere before it does. So
# MERGED: one microbatch
# MERGED: goes through all stages first; the last rank tells the others whether there was a loss; and then all do
# MERGED: the rest, with
# MERGED: the backwards or without.


_FORWARDS = frozenset({Op.FORWARD, Op.SEND_F, Op.RECV_F})
_WITHOUT_GRADIENTS = _FORWARDS | {Op.UNSHARD, Op.RESHARD}


@dataclass(frozen=True)
class _Opening:
    """The microbatch that comes to the last stage first, and the rank of that stage."""

    microbatch: int
    last_rank: int

    def includes(self, action: Action) -> bool:
        """Whether an action takes the microbatch forward."""
        return action.op in _FORWARDS and action.microbatch == self.microbatch


def opening_of(plan: Plan) -> _Opening | None:
    """The opening of a plan; None if its forwards do not stand alone, but in an overlap.

    >>> from pipecut.schedule import plan_for
    >>> opening_of(plan_for("1F1B", ranks=2, microbatches=4))
    Opening(microbatch=0, last_rank=1)
    """
    last_rank = plan.placement.rank_of[plan.stages - 1]
    every = [action for row in plan.actions for action in row if action is not None]
    arrivals = [leaf for action in plan.actions[last_rank] if action is not None for leaf in action.leaves]
    first = next(leaf for leaf in arrivals if leaf.op is Op.FORWARD and leaf.stage == plan.stages - 1)
    assert first.microbatch is not None  # a forward
    opening = _Opening(first.microbatch, last_rank)
    overlapped = [leaf for action in every if action.op is Op.OVERLAP_F_B for leaf in action.leaves]
    return None if any(map(opening.includes, overlapped)) else opening


def _without_backwards(actions: Sequence[Action]) -> list[Action]:
    """The actions that are left if there is nothing to train with."""
    return [leaf for action in actions for leaf in action.leaves if leaf.op in _WITHOUT_GRADIENTS]


def _settle(executor: Executor, *, trains: bool) -> None:
    """It is known now how the step goes on."""
    executor.batch.is_open, executor.batch.training = False, trains
    if trains:
        return
    executor.ties.finish()  # gives back the gradients that were set aside
    for stage in executor.stages.values():
        stage.flights.clear()


# Receives posted before their turn, as long as they are small. Each wakes a thread of the sender; many wake it once.
_AHEAD = 32
_BYTES_AHEAD = 32 * 1024 * 1024
_AHEAD_AT_LEAST = 2


_Placed = tuple[int, Action]  # a rank, and what it does


class Runner(Protocol):
    """Runs one step."""

    spans: list[Span]
    tracing: bool

    def run(self, batches: Mapping[int, Batch]) -> None:
        """Do all actions with the data of each rank that is here."""


def _is_watched(runner: Runner) -> bool:
    """Whether the times of actions are asked for: by the user, or by a profiler that is on."""
    return runner.tracing or profiler_is_on()


def _perform_watched(rank: int, action: Action, handler: Handler) -> Span:
    """Do an action in a range of the profiler that has its text, and take its times down."""
    with torch.profiler.record_function(f"pipecut {action}"):
        start = time.perf_counter()
        handler(action)
        return Span(rank, action, start, time.perf_counter())


class RankRunner:
    """This process is one rank of the plan."""

    def __init__(self, executor: Executor, plan: Plan, alarm: Alarm | None) -> None:
        self.executor = executor
        self.alarm = alarm
        self.rank = executor.transport.rank
        self.row = [action for action in plan.actions[self.rank] if action is not None]
        self.opening = opening_of(plan)
        self.spans: list[Span] = []
        self.tracing = False
        self._action: Action | None = None  # that is being done

    def run(self, batches: Mapping[int, Batch]) -> None:
        executor = self.executor
        try:
            executor.begin(batches[self.rank])
        except Exception as error:
            raise self._failed(None, error, BEGIN) from error
        self.spans = []
        self._action = None
        try:
            self._do(self._settled() if executor.batch.is_open else self.row)
            executor.finish()
            executor.transport.finish()
        except Exception as error:
            raise self._failed(self._action, error) from error
        finally:
            executor.clear()

    def _settled(self) -> list[Action]:
        """Do the opening, find out whether this is training, and return what is left to be done."""
        assert self.opening is not None  # a batch is open for plans that have one
        executor, last = self.executor, self.opening.last_rank
        self._do([action for action in self.row if self.opening.includes(action)])
        rest = [action for action in self.row if not self.opening.includes(action)]
        known = [int(executor.batch.training)] if self.rank == last else None
        trains = executor.transport.share(last, known, 1) == [1]
        _settle(executor, trains=trains)
        return rest if trains else _without_backwards(rest)

    def _do(self, row: Sequence[Action]) -> None:
        executor = self.executor
        handlers = executor.handlers
        watched = _is_watched(self)
        ahead = _PostedAhead(executor, [action for action in row if action.op in RECEIVES])
        for action in row:
            self._action = action
            ahead.post()
            handler = ahead.reached if action.op in RECEIVES else handlers[action.op]
            if watched:
                if action.is_compute:  # so that its time has no waiting in it
                    executor.mail.wait_for(action)
                self.spans.append(_perform_watched(self.rank, action, handler))
            else:
                handler(action)
        self._action = None

    def _failed(self, action: Action | None, error: Exception, where: str = END) -> StepError:
        failure = _failure_of(self.executor, action, error, where)
        if self.alarm is None:
            return step_error(str(failure), error)
        return self.alarm.raise_on_all(failure, error)


class _PostedAhead:
    """Receives posted before their turn, a few at a time, in their order."""

    def __init__(self, executor: Executor, receives: Sequence[Action]) -> None:
        self.executor = executor
        self.receives = receives
        self.most = _AHEAD if executor.transport.receives_ahead else 0
        self.enough = self.most // 2
        self.posted = 0
        self.passed = 0
        self.sizes: list[int] = []
        self.bytes_ahead = 0

    def post(self) -> None:
        """Post as many as may be ahead, and are known, unless there are many still."""
        if self.posted - self.passed > self.enough:
            return
        while self.posted < len(self.receives):
            ahead = self.posted - self.passed
            if ahead >= self.most or (ahead >= _AHEAD_AT_LEAST and self.bytes_ahead > _BYTES_AHEAD):
                return
            action = self.receives[self.posted]
            size = self.executor.mail.size_of(action)
            if size is None:
                return
            self.executor.mail.post(action)
            self.sizes.append(size)
            self.bytes_ahead += size
            self.posted += 1

    def reached(self, action: Action) -> None:
        """The turn of a receive has come."""
        if self.posted == self.passed:
            self.executor.mail.post(action)
            self.sizes.append(0)
            self.posted += 1
        self.bytes_ahead -= self.sizes[self.passed]
        self.passed += 1


def _failure_of(executor: Executor, action: Action | None, error: Exception, where: str = END) -> Failure:
    """What went wrong, and where: of an overlap, in which part."""
    place = executor.part or action
    stage = None if place is None else executor.stages.get(place.stage)
    failure = describe(executor.transport.rank, place, None if stage is None else stage.submod, error, where)
    if executor.ending.in_loss_fn:
        return replace(failure, where=f"{failure.where}, in loss_fn")
    if executor.inputs is not None and failure.lost is None:
        called = ", ".join(str(Meta.of(value)) for value in executor.inputs if isinstance(value, torch.Tensor))
        return replace(failure, error=f"{failure.error} (the stage was called with {called})")
    return failure


class LocalRunner:
    """All ranks of the plan are in this process, and take turns in an order that the plan allows."""

    def __init__(self, executors: Sequence[Executor], plan: Plan, office: PostOffice) -> None:
        self.executors = executors
        self.plan = plan
        self.office = office
        self.opening = opening_of(plan)
        self.order = [(rank, action) for rank, action in Walk(plan)]
        self.spans: list[Span] = []
        self.tracing = False
        self._place: tuple[int, Action | None] = (0, None)  # the rank and the action that is being done

    def run(self, batches: Mapping[int, Batch]) -> None:
        for rank, executor in enumerate(self.executors):
            executor.begin(batches[rank])
        self.spans = []
        self._place = (0, None)
        try:
            self._do(self._settled() if batches[0].is_open else self.order)
            finish_together(self.executors)
        except Exception as error:
            rank, action = self._place
            raise step_error(str(_failure_of(self.executors[rank], action, error)), error) from error
        finally:
            for executor in self.executors:
                executor.clear()
            self.office.clear()

    def _settled(self) -> list[_Placed]:
        """Do the opening, find out whether this is training, and return what is left to be done."""
        assert self.opening is not None  # a batch is open for plans that have one
        self._do([(rank, action) for rank, action in self.order if self.opening.includes(action)])
        rest = [(rank, action) for rank, action in self.order if not self.opening.includes(action)]
        trains = self.executors[self.opening.last_rank].batch.training
        for executor in self.executors:
            _settle(executor, trains=trains)
        return rest if trains else [(rank, leaf) for rank, action in rest for leaf in _without_backwards([action])]

    def _do(self, order: Sequence[_Placed]) -> None:
        watched = _is_watched(self)
        for rank, action in order:
            self._place = (rank, action)
            handler = self.executors[rank].handlers[action.op]
            if watched:
                self.spans.append(_perform_watched(rank, action, handler))
            else:
                handler(action)
        self._place = (self._place[0], None)


# MERGED: Steps of a schedule without a loss_fn: they train if the output of the model holds a loss, and else tell
# MERGED: that not.


_LOSS, _OWN, _GIVEN = "loss", "the model's own", "that of loss_fn"  # what the last stage's rank tells the others


class OpenSteps:
    """Whether the steps of a schedule are open. They are not any more, once one of them has trained."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._has_trained = False

    @property
    def fact(self) -> dict[str, str]:
        """What the rank of the last stage has to tell."""
        return {_LOSS: _OWN if self._objective.is_own else _GIVEN}

    def is_next(self, plan: Plan, told: Mapping[str, str]) -> bool:
        """Whether the next step trains only if there is a loss, by what the ranks have told each other."""
        return told.get(_LOSS) == _OWN and not self._has_trained and opening_of(plan) is not None

    def run(self, runner: Runner, batches: Mapping[int, Batch], last_rank: int) -> bool:
        """Run such a step, and return whether it trained."""
        for batch in batches.values():
            batch.is_open = True
        if last_rank in batches:
            self._objective.without_loss = batches[last_rank].has_no_loss
        try:
            runner.run(batches)
        finally:
            self._objective.without_loss = None
        self._has_trained = all(batch.training for batch in batches.values())
        if not self._has_trained:
            _warn()
        return self._has_trained


def _warn() -> None:
    """A user who forgot the loss must not believe that he trains."""
    warnings.warn(
        "step() has run forwards only, and no gradients were computed: there is neither a loss_fn nor a target, and "
        f"the output of the model holds no loss (were the labels passed?). To evaluate, call eval(); to train, {WAYS}",
        PipeWarning,
        stacklevel=5,  # the user's call of step()
    )
