"""Runs the actions of a plan: those of this rank, or those of all ranks in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ..action import RECEIVES, Action
from ..plan import Plan
from ..timeline import Span
from ..walk import Walk
from .batch import Batch
from .executor import Executor, Handler, finish_together
from .failure import BEGIN, END, Alarm, Failure, StepError, describe, step_error
from .in_process import PostOffice
from .opening import opening_of, settle, without_backwards
from .transport import Meta

# Receives posted before their turn, as long as they are small. Each wakes a thread of the sender; many wake it once.
AHEAD = 32
BYTES_AHEAD = 32 * 1024 * 1024
AHEAD_AT_LEAST = 2


Placed = tuple[int, Action]  # a rank, and what it does


class Runner(Protocol):
    """Runs one step."""

    spans: list[Span]
    tracing: bool

    def run(self, batches: Mapping[int, Batch]) -> None:
        """Do all actions with the data of each rank that is here."""


def is_watched(runner: Runner) -> bool:
    """Whether the times of actions are asked for: by the user, or by a profiler that is on."""
    return runner.tracing or torch.autograd.profiler._is_profiler_enabled


def perform_watched(rank: int, action: Action, handler: Handler) -> Span:
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
        settle(executor, trains=trains)
        return rest if trains else without_backwards(rest)

    def _do(self, row: Sequence[Action]) -> None:
        executor = self.executor
        handlers = executor.handlers
        watched = is_watched(self)
        ahead = _PostedAhead(executor, [action for action in row if action.op in RECEIVES])
        for action in row:
            self._action = action
            ahead.post()
            handler = ahead.reached if action.op in RECEIVES else handlers[action.op]
            if watched:
                if action.is_compute:  # so that its time has no waiting in it
                    executor.mail.wait_for(action)
                self.spans.append(perform_watched(self.rank, action, handler))
            else:
                handler(action)
        self._action = None

    def _failed(self, action: Action | None, error: Exception, where: str = END) -> StepError:
        failure = failure_of(self.executor, action, error, where)
        if self.alarm is None:
            return step_error(str(failure), error)
        return self.alarm.raise_on_all(failure, error)


class _PostedAhead:
    """Receives posted before their turn, a few at a time, in their order."""

    def __init__(self, executor: Executor, receives: Sequence[Action]) -> None:
        self.executor = executor
        self.receives = receives
        self.most = AHEAD if executor.transport.receives_ahead else 0
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
            if ahead >= self.most or (ahead >= AHEAD_AT_LEAST and self.bytes_ahead > BYTES_AHEAD):
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


def failure_of(executor: Executor, action: Action | None, error: Exception, where: str = END) -> Failure:
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
            raise step_error(str(failure_of(self.executors[rank], action, error)), error) from error
        finally:
            for executor in self.executors:
                executor.clear()
            self.office.clear()

    def _settled(self) -> list[Placed]:
        """Do the opening, find out whether this is training, and return what is left to be done."""
        assert self.opening is not None  # a batch is open for plans that have one
        self._do([(rank, action) for rank, action in self.order if self.opening.includes(action)])
        rest = [(rank, action) for rank, action in self.order if not self.opening.includes(action)]
        trains = self.executors[self.opening.last_rank].batch.training
        for executor in self.executors:
            settle(executor, trains=trains)
        return rest if trains else [(rank, leaf) for rank, action in rest for leaf in without_backwards([action])]

    def _do(self, order: Sequence[Placed]) -> None:
        watched = is_watched(self)
        for rank, action in order:
            self._place = (rank, action)
            handler = self.executors[rank].handlers[action.op]
            if watched:
                self.spans.append(perform_watched(rank, action, handler))
            else:
                handler(action)
        self._place = (self._place[0], None)
