"""The running step of a schedule as code written for torch.distributed.pipelining sees it."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..run import ActionContext, Executor, StepState
from ..schedule import Action, Op
from .actions import UpstreamAction, from_upstream
from .stage_calls import UpstreamStage

if TYPE_CHECKING:
    from .orders import UpstreamSchedule


class StepObserver:
    """Follows the steps of one schedule: drives its stages' calls, counts backwards, and keeps the outputs."""

    def __init__(self, schedule: UpstreamSchedule) -> None:
        self._schedule = weakref.ref(schedule)  # which holds this
        self.executors: list[Executor] = []  # of the ranks whose step is running
        self.backward_counter = Counter[int]()  # by stage; custom functions count their own
        self.is_counting = True

    @property
    def schedule(self) -> UpstreamSchedule:
        """The schedule whose steps these are."""
        schedule = self._schedule()
        assert schedule is not None  # it is running
        return schedule

    def begin(self, executor: Executor) -> None:
        """Check what upstream checks before the first action, and let the stages' calls go to the executor."""
        self.schedule._check_batch(executor.state)
        _check_inputs(executor)
        self.backward_counter.clear()
        self.executors.append(executor)
        for stage in _stages_of(executor):
            stage.driver = StageDriver(executor, self)
            stage.has_backward = executor.state.training
            stage.output_chunks = []  # those of the step before are not held beside the new ones

    def after_backward(self, stage: int) -> None:
        """Count a backward of a stage."""
        if self.is_counting:
            self.backward_counter[stage] += 1

    def end(self, executor: Executor) -> None:
        """Leave `output_chunks` on the last stage, if the step came to its end."""
        if executor not in self.executors:
            return
        self.executors.remove(executor)
        state = executor.state
        for stage in _stages_of(executor):
            stage.driver = None
            stage.has_backward = state.training
            if stage.is_last and len(state.results) == len(state.samples):
                stage.output_chunks = [state.results[number] for number in sorted(state.results)]


def _stages_of(executor: Executor) -> list[UpstreamStage]:
    return [stage for stage in executor.stages.values() if isinstance(stage, UpstreamStage)]


def _check_inputs(executor: Executor) -> None:
    state = executor.state
    for stage in _stages_of(executor):
        if stage.is_first and stage.ports is None and state.args:
            for microbatch, args in enumerate(state.args):
                stage.check_inputs(microbatch, args, state.kwargs[microbatch] if state.kwargs else {})


class StageDriver:
    """Runs actions of one rank for `stage.forward_one_chunk()` and its kin, during a step."""

    def __init__(self, executor: Executor, observer: StepObserver) -> None:
        self._executor = executor
        self._observer = observer

    @property
    def batch(self) -> StepState:
        """The data of the step."""
        return self._executor.state

    @property
    def grad_scale_factor(self) -> int:
        """The number that upstream divides gradients by; ours are scaled where they begin."""
        return len(self.batch.samples) if self._observer.schedule.scale_grads else 1

    def forward(self, stage: UpstreamStage, microbatch: int) -> Any:
        """Run a forward, and return what the module returned."""
        self._run(Action(stage.stage_index, Op.FORWARD, microbatch))
        flight = stage.flights.get(microbatch)
        if flight is None or stage.is_last:
            return self.batch.results.get(microbatch)
        return stage.returned(flight)

    def backward(self, stage: UpstreamStage, microbatch: int, *, weights: bool) -> None:
        """Run a backward, in full or for the inputs only."""
        self._run(Action(stage.stage_index, Op.FULL_BACKWARD if weights else Op.BACKWARD_INPUT, microbatch))

    def weight_backward(self, stage: UpstreamStage, microbatch: int) -> None:
        """Run the rest of a backward."""
        self._run(Action(stage.stage_index, Op.BACKWARD_WEIGHT, microbatch))

    def _run(self, action: Action) -> None:
        """Run an action; the custom function that asks for it counts its backwards by itself."""
        self._observer.is_counting = False
        try:
            ActionContext(self._executor).run(action)
        finally:
            self._observer.is_counting = True


@dataclass
class PipelineContext:
    """Second argument of a custom function written for upstream."""

    schedule_ref: Any
    arg_mbs: list[Any] | None = None
    kwarg_mbs: list[Any] | None = None
    target_mbs: Any = None
    losses: list[Tensor] | None = None


@dataclass
class StepContext(PipelineContext):
    """The same in a step, with the usual way to run an action."""

    own: ActionContext | None = None

    def run(self, action: UpstreamAction | Action) -> None:
        """Run an action in the usual way."""
        assert self.own is not None
        self.own.run(from_upstream(action))


def context_of(schedule: UpstreamSchedule, own: ActionContext) -> StepContext:
    """Make the second argument of a custom function."""
    state = own.executor.state
    none = [()] * len(state.samples)
    return StepContext(
        schedule,
        arg_mbs=list(state.args) or none,
        kwarg_mbs=list(state.kwargs) or [{} for _ in none],
        target_mbs=state.targets,
        losses=schedule._losses_to_fill,
        own=own,
    )
