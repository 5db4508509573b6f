"""Runners: go through the actions of a plan, those of this rank or those of all ranks in one process.

Without a loss_fn it is up to the model's output whether a step trains. The rank of the last stage sees the output, and
no backward can have begun anywhere before it does. So one microbatch goes through all stages first, the loss probe; the
last rank informs the others whether there was a loss; and then all run the rest, with the backwards or without.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..errors import StepError, warn
from ..schedule import RECEIVES, Action, Op, Plan, Span, Walk
from ..torch_internals import profiler_is_on
from .executor import Executor, Handler, finish_together
from .failure import BEGIN, END, Failure, FailureReports, Watchdog, describe, step_error
from .gradients import restore_gradients
from .loss import HOW_TO_GET_A_LOSS, Objective
from .state import StepState
from .transport import Clock, Meta, Turn

# Receives posted before their turn, as long as they are small. Each wakes a thread of the sender; many wake it once.
_AHEAD = 32
_BYTES_AHEAD = 32 * 1024 * 1024
_AHEAD_AT_LEAST = 2


_Placed = tuple[int, Action]  # a rank, and an action of it


class Runner(Protocol):
    """Runs one step."""

    executors: Sequence[Executor]
    turns: list[Turn]
    spans: list[Span]
    tracing: bool
    probe: _LossProbe | None

    def run(self, states: Mapping[int, StepState]) -> None:
        """Run all actions, on the state of each rank that is here."""


def _is_timed(runner: Runner) -> bool:
    """Return True if the times of actions are asked for: by the user, or by a profiler that is on."""
    return runner.tracing or profiler_is_on()


def _run_timed(rank: int, action: Action, handler: Handler, state: StepState) -> Span:
    """Run an action in a range of the profiler that has its text, and return its times."""
    with torch.profiler.record_function(f"pipecut {action}"):
        start = time.perf_counter()
        handler(action, state)
        return Span(rank, action, start, time.perf_counter())


class RankRunner:
    """Runs one rank of the plan, which this process is."""

    def __init__(self, executor: Executor, plan: Plan, failure_reports: FailureReports | None) -> None:
        self.executor = executor
        self.executors: Sequence[Executor] = [executor]
        self.failure_reports = failure_reports
        self.rank = executor.transport.rank
        self.row = [action for action in plan.actions[self.rank] if action is not None]
        self.probe = loss_probe_of(plan)
        self.turns: list[Turn] = []  # of one rank there are none
        self.spans: list[Span] = []
        self.tracing = False
        self._action: Action | None = None  # the one that is running

    def run(self, states: Mapping[int, StepState]) -> None:
        executor, state = self.executor, states[self.rank]
        self.spans = []
        self._action = None
        where = BEGIN
        try:
            executor.prepare(state)
            executor.begin()
            where = END
            with self._watched():
                self._do(self._rest_after_probe(state) if state.training_undecided else self.row, state)
            finish_together([executor])
            executor.transport.finish()
            executor.end()
        except BaseException as error:
            raised = self._failed(error, where, state)
            if not isinstance(error, Exception):
                raise  # the others hear of it; here a KeyboardInterrupt stays one
            raise raised from error
        finally:
            self._action = None

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which actions run: with partners there are waits without a timeout."""
        reports = self.failure_reports
        if reports is None or not reports.has_partners:
            return contextlib.nullcontext()
        return Watchdog(reports, lambda: self._action)

    def _rest_after_probe(self, state: StepState) -> list[Action]:
        """Run the loss probe, find out whether the step trains, and return the actions that are left."""
        assert self.probe is not None  # training is undecided for plans that have one
        last = self.probe.last_rank
        self._do([action for action in self.row if self.probe.includes(action)], state)
        rest = [action for action in self.row if not self.probe.includes(action)]
        known = [int(state.training)] if self.rank == last else None
        trains = self.executor.transport.share(last, known, 1) == [1]
        _resolve_training(self.executor, trains=trains)
        return rest if trains else _without_backwards(rest)

    def _do(self, row: Sequence[Action], state: StepState) -> None:
        executor = self.executor
        handlers = executor.handlers
        timed = _is_timed(self)
        ahead = None
        if executor.transport.receives_ahead:
            ahead = _PostedAhead(executor, [action for action in row if action.op in RECEIVES], state)
            handlers = {**handlers, **dict.fromkeys(RECEIVES, ahead.reached)}
        for action in row:
            self._action = action
            if ahead is not None:
                ahead.post()
            handler = handlers[action.op]
            if timed:
                if action.is_compute:  # so that its time has no waiting in it
                    executor.mail.wait_for(action, state)
                self.spans.append(_run_timed(self.rank, action, handler, state))
            else:
                handler(action, state)
        self._action = None

    def _failed(self, error: BaseException, where: str, state: StepState) -> StepError:
        failure = _failure_of(self.executor, self._action, error, where, state)
        _drop([self.executor])
        note = restore_gradients([state])
        if self.failure_reports is None:
            return step_error(f"{failure}{note}", error)
        return self.failure_reports.raise_on_all(failure, error, note)


def _drop(executors: Sequence[Executor]) -> None:
    """Drop everything of a step that failed, whatever else goes wrong with it: the first error is the one to tell."""
    for executor in executors:
        with contextlib.suppress(Exception):
            executor.end()


class _PostedAhead:
    """Receives posted before their turn, a few at a time, in their order."""

    def __init__(self, executor: Executor, receives: Sequence[Action], state: StepState) -> None:
        self.mail = executor.mail
        self.state = state
        self.receives = receives
        self.posted = 0
        self.passed = 0
        self.sizes: list[int] = []
        self.bytes_ahead = 0

    def post(self) -> None:
        """Post as many as may be ahead, and are known, unless there are many still."""
        if self.posted - self.passed > _AHEAD // 2:
            return
        while self.posted < len(self.receives):
            ahead = self.posted - self.passed
            if ahead >= _AHEAD or (ahead >= _AHEAD_AT_LEAST and self.bytes_ahead > _BYTES_AHEAD):
                return
            action = self.receives[self.posted]
            size = self.mail.size_of(action, self.state)
            if size is None:
                return
            self.mail.post(action, self.state)
            self.sizes.append(size)
            self.bytes_ahead += size
            self.posted += 1

    def reached(self, action: Action, state: StepState) -> None:
        """Post a receive whose turn it is, unless it is posted."""
        if self.posted == self.passed:
            self.mail.post(action, state)
            self.sizes.append(0)
            self.posted += 1
        self.bytes_ahead -= self.sizes[self.passed]
        self.passed += 1


def _failure_of(
    executor: Executor, action: Action | None, error: BaseException, where: str, state: StepState
) -> Failure:
    """Describe what went wrong, and where: of an overlap, in which part."""
    place = state.part or action
    stage = None if place is None else executor.stages.get(place.stage)
    failure = describe(executor.transport.rank, place, None if stage is None else stage.submod, error, where)
    if state.in_loss_fn:
        return replace(failure, where=f"{failure.where}, in loss_fn")
    if state.stage_inputs is not None and failure.lost is None:
        called = ", ".join(str(Meta.of(value)) for value in state.stage_inputs if isinstance(value, torch.Tensor))
        return replace(failure, error=f"{failure.error} (the stage was called with {called})")
    return failure


class LocalRunner:
    """Runs all ranks of the plan in this process, which take turns in an order that the plan allows."""

    def __init__(self, executors: Sequence[Executor], plan: Plan, clock: Clock) -> None:
        self.executors = executors
        self.clock = clock
        self.plan = plan
        self.probe = loss_probe_of(plan)
        self.order = [(rank, action) for rank, action in Walk(plan)]
        self.turns: list[Turn] = []
        self.spans: list[Span] = []
        self.tracing = False
        self._place: tuple[int, Action | None] = (0, None)  # the rank and the action that is running

    def run(self, states: Mapping[int, StepState]) -> None:
        self.spans, self.turns = [], []
        self._place = (0, None)
        has_begun = False
        try:
            for rank, executor in enumerate(self.executors):
                executor.prepare(states[rank])
            for executor in self.executors:
                executor.begin()
            has_begun = True
            self._do(self._rest_after_probe(states) if states[0].training_undecided else self.order, states)
            finish_together(self.executors)
            for executor in self.executors:
                executor.transport.finish()
                executor.end()
        except BaseException as error:
            rank, action = self._place
            failure = _failure_of(self.executors[rank], action, error, END, states[rank])
            _drop(self.executors)
            note = restore_gradients(states.values())
            if not has_begun or not isinstance(error, Exception):
                raise
            raise step_error(f"{failure}{note}", error) from error
        finally:
            self._place = (0, None)
            for executor in self.executors:
                executor.transport.clear()

    def _rest_after_probe(self, states: Mapping[int, StepState]) -> list[_Placed]:
        """Run the loss probe, find out whether the step trains, and return the actions that are left."""
        assert self.probe is not None  # training is undecided for plans that have one
        self._do([(rank, action) for rank, action in self.order if self.probe.includes(action)], states)
        rest = [(rank, action) for rank, action in self.order if not self.probe.includes(action)]
        trains = states[self.probe.last_rank].training
        for executor in self.executors:
            _resolve_training(executor, trains=trains)
        return rest if trains else [(rank, leaf) for rank, action in rest for leaf in _without_backwards([action])]

    def _do(self, order: Sequence[_Placed], states: Mapping[int, StepState]) -> None:
        timed, now = _is_timed(self), self.clock.now
        begin = now()
        for rank, action in order:
            self._place = (rank, action)
            handler = self.executors[rank].handlers[action.op]
            if timed:
                self.spans.append(_run_timed(rank, action, handler, states[rank]))
            else:
                handler(action, states[rank])
            end = now()
            self.turns.append((rank, (begin, end)))
            begin = end
        self._place = (self._place[0], None)


# The loss probe.

_FORWARDS = frozenset({Op.FORWARD, Op.SEND_F, Op.RECV_F})
_WITHOUT_GRADIENTS = _FORWARDS | {Op.UNSHARD, Op.RESHARD}


@dataclass(frozen=True)
class _LossProbe:
    """The microbatch that comes to the last stage first, and the rank of that stage."""

    microbatch: int
    last_rank: int

    def includes(self, action: Action) -> bool:
        """Return True if an action takes the microbatch forward."""
        return action.op in _FORWARDS and action.microbatch == self.microbatch


def loss_probe_of(plan: Plan) -> _LossProbe | None:
    """Return the loss probe of a plan; None if its forwards do not stand alone, but in an overlap.

    >>> from pipecut.schedule import plan_for
    >>> loss_probe_of(plan_for("1F1B", ranks=2, microbatches=4))
    _LossProbe(microbatch=0, last_rank=1)
    """
    last_rank = plan.placement.rank_of[plan.stages - 1]
    every = [action for row in plan.actions for action in row if action is not None]
    arrivals = [leaf for action in plan.actions[last_rank] if action is not None for leaf in action.leaves]
    first = next(leaf for leaf in arrivals if leaf.op is Op.FORWARD and leaf.stage == plan.stages - 1)
    assert first.microbatch is not None  # a forward
    probe = _LossProbe(first.microbatch, last_rank)
    overlapped = [leaf for action in every if action.op is Op.OVERLAP_F_B for leaf in action.leaves]
    return None if any(map(probe.includes, overlapped)) else probe


def _without_backwards(actions: Sequence[Action]) -> list[Action]:
    """Return the actions that are left if there is nothing to train with."""
    return [leaf for action in actions for leaf in action.leaves if leaf.op in _WITHOUT_GRADIENTS]


def _resolve_training(executor: Executor, *, trains: bool) -> None:
    """Decide how the step goes on."""
    executor.state.training_undecided, executor.state.training = False, trains
    if not trains:
        executor.ties.finish()  # gives back the gradients that were set aside
        for stage in executor.stages.values():
            stage.clear()


_LOSS, _OWN, _GIVEN = "loss", "the model's own", "that of loss_fn"  # the fact that the last stage's rank reports


class LossProbing:
    """Runs steps that train only if the model's output holds a loss; none does so any more, once one has trained."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._has_trained = False

    @property
    def fact(self) -> dict[str, str]:
        """The fact that the rank of the last stage reports."""
        return {_LOSS: _OWN if self._objective.is_own else _GIVEN}

    def is_needed(self, runner: Runner, reported: Mapping[str, str]) -> bool:
        """Return True if the next step trains only if there is a loss, by the facts that the ranks reported."""
        return reported.get(_LOSS) == _OWN and not self._has_trained and runner.probe is not None

    def run(self, runner: Runner, states: Mapping[int, StepState]) -> bool:
        """Run such a step, and return True if it trained."""
        for state in states.values():
            state.training_undecided = True
        runner.run(states)
        self._has_trained = all(state.training for state in states.values())
        if not self._has_trained:
            # A user who forgot the loss must not believe that the model is trained.
            warn(
                "step() has run forwards only, and no gradients were computed: there is neither a loss_fn nor a "
                "target, and the output of the model holds no loss (were the labels passed?). To evaluate, call "
                f"eval(); to train, {HOW_TO_GET_A_LOSS}"
            )
        return self._has_trained
