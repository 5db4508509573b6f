"""The one executor: a table from Op to handler, on the actions of one rank; a user may replace a handler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..errors import InputError
from ..schedule import Action, Op, Plan
from ..stage import PipelineStage
from .examples import check_arrived, taken_by
from .gradients import AddedLosses, Gradients, NestedLeaves, give_to_inputs, graph_leaf, note_gradients
from .last_stage import LastStage
from .loss import Objective
from .mail import Mail
from .parcels import Parcels
from .random_numbers import RandomNumbers
from .state import StepState
from .ties import TiedGradients
from .transport import Transport

Handler = Callable[[Action, StepState], None]


class Observer(Protocol):
    """Follows the steps of a schedule, on each rank of this process."""

    def begin(self, executor: Executor) -> None:
        """Note that a step begins; an error raised here ends it before its first action."""

    def after_backward(self, stage: int) -> None:
        """Note that one microbatch has all of its gradients on a stage."""

    def end(self, executor: Executor) -> None:
        """Note that a step has ended, or failed; its state is dropped right after."""


class _StageCall(NamedTuple):
    """The call of a stage's module, on leaves of its own graph; `nested` are those in nested values and keywords."""

    args: list[Any]
    kwargs: Mapping[str, Any]
    nested: NestedLeaves | None = None


class Executor:
    """Runs the actions of a plan for the stages of one rank, one at a time.

    All that lives for one step is in a StepState, which the handlers of actions get along with the action.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, PipelineStage],
        parcels: Parcels,
        transport: Transport,
        objective: Objective,
        *,
        scale_gradients: bool,
        ties: TiedGradients,
        random_numbers: RandomNumbers,
        added_losses: AddedLosses,
        observer: Observer | None,
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.transport = transport
        self.ties = ties
        self.random_numbers = random_numbers
        self.mail = Mail(plan, stages, parcels, transport, random_numbers)
        self.gradients = Gradients(self.mail, {stage: plan.dataflow.users[stage] for stage in stages})
        self.last_stage = LastStage(objective, scale_gradients=scale_gradients)
        self.added_losses = added_losses
        self.observer = observer
        self._state: StepState | None = None
        self._sources = {
            index: sorted({*stage.ports.incoming, *plan.dataflow.makers[index]})
            for index, stage in stages.items()
            if stage.ports is not None
        }
        actions = [action for row in plan.actions for action in row if action is not None]
        self._reduced_by_plan = {action.stage for action in actions if action.op is Op.REDUCE_GRAD}
        self._splits_backward = any(action.op in (Op.BACKWARD_INPUT, Op.OVERLAP_F_B) for action in actions)
        self.handlers: dict[Op, Handler] = {
            Op.FORWARD: self._forward,
            Op.FULL_BACKWARD: self._full_backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_F: self.mail.send_activations,
            Op.RECV_F: self.mail.post,
            Op.SEND_B: self.mail.send_gradients,
            Op.RECV_B: self.mail.post,
            Op.UNSHARD: lambda action, _: self.stages[action.stage].replica.unshard(),
            Op.RESHARD: lambda action, _: self.stages[action.stage].replica.reshard(),
            Op.REDUCE_GRAD: self._reduce_gradients,
            Op.REDUCE_TIES: lambda action, _: self.ties.sum(action.microbatch or 0),
            Op.OVERLAP_F_B: self._overlap,
        }
        self.usual_handlers = dict(self.handlers)

    @property
    def state(self) -> StepState:
        """The state of the step that is running."""
        assert self._state is not None  # asked for during a step only
        return self._state

    def prepare(self, state: StepState) -> None:
        """Prepare a step, before any rank of this process begins it."""
        self._state = state
        state.backwards_left = dict.fromkeys(self.stages, len(state.samples))
        if state.training:
            for stage in self.stages.values():
                stage.begin_step(splits_backward=self._splits_backward or self.handlers != self.usual_handlers)
                note_gradients(stage.weights.parameters, state)

    def begin(self) -> None:
        """Begin the step."""
        if self.state.training:
            self.ties.begin()
        if self.observer is not None:
            self.observer.begin(self)

    def end(self) -> None:
        """Drop everything of the step, which has ended or failed."""
        if self._state is None:
            return
        try:
            if self._state.training:
                self.ties.finish()  # after a failure, gradients from before the step are still set aside
            for stage in self.stages.values():
                stage.clear()
            if self.observer is not None:
                self.observer.end(self)
        finally:
            self._state = None

    # Computations.

    def _forward(self, action: Action, state: StepState) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        assert microbatch is not None  # a proven plan
        call = (
            self._call_by_hand(stage, microbatch, state)
            if stage.ports is None
            else self._call(stage, microbatch, state)
        )
        state.stage_inputs = call.args
        with self.random_numbers.forward(stage, microbatch, state):
            flight = stage.forward(microbatch, call.args, call.kwargs, training=state.training)
            if call.nested is not None:
                self.gradients.expect_nested(action.stage, microbatch, call.nested, flight, state)
            if stage.is_last:
                self.last_stage.finish_forward(stage, microbatch, flight, state)
        state.stage_inputs = None
        for target in self.gradients.users[action.stage]:
            self.mail.hand_over(action.stage, target, microbatch, flight, state)

    def _call(self, stage: PipelineStage, microbatch: int, state: StepState) -> _StageCall:
        """Make the call of a traced stage from the inputs of the model and from what other stages sent."""
        assert stage.ports is not None  # a traced stage
        index = stage.stage_index
        arrived = {}
        for maker in self._sources[index]:
            arrived[maker] = self.mail.take(maker, index, microbatch, state)
        args = []
        for source, place in stage.ports.arguments:
            args.append(graph_leaf(state.roots[microbatch][place]) if source is None else arrived[source][place])
        return _StageCall(args, {})

    def _call_by_hand(self, stage: PipelineStage, microbatch: int, state: StepState) -> _StageCall:
        """Make the call of a module that was cut by hand: it takes keywords too, and the first one nested values."""
        nested = NestedLeaves()
        enter = nested.put_into if state.training else _unchanged
        if stage.is_first:
            args = [
                graph_leaf(value) if isinstance(value, Tensor) else enter(value) for value in state.args[microbatch]
            ]
        else:
            args = self.mail.take(stage.stage_index - 1, stage.stage_index, microbatch, state)
            check_arrived(stage, args)
        given = state.kwargs[microbatch] if state.kwargs else {}
        kwargs = enter(taken_by(stage.submod, len(args), given)) if given else {}
        return _StageCall(args, kwargs, nested if nested.leaves else None)

    def _full_backward(self, action: Action, state: StepState) -> None:
        self._backward(action, state, weights=True)
        self._count_backward(action.stage, state)

    def _backward_input(self, action: Action, state: StepState) -> None:
        self._backward(action, state, weights=False)

    def _backward_weight(self, action: Action, state: StepState) -> None:
        assert action.microbatch is not None  # a proven plan
        self.stages[action.stage].weight_backward(action.microbatch)
        self._count_backward(action.stage, state)

    def _backward(self, action: Action, state: StepState, *, weights: bool) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        assert microbatch is not None  # a proven plan
        flight = stage.flights[microbatch]
        if flight.loss is None:
            grads = self.gradients.of_outputs(stage, microbatch, state)
        else:
            grads = [self.last_stage.gradient(flight.loss, microbatch, state)]
        inputs = flight.inputs
        input_grads = stage.backward(microbatch, grads, weights=weights)
        self.gradients.give_back(stage, microbatch, inputs, input_grads, state)

    def _count_backward(self, stage: int, state: StepState) -> None:
        """After the last backward of a stage, reduce its gradients, unless the plan says when."""
        if self.observer is not None:
            self.observer.after_backward(stage)
        state.backwards_left[stage] -= 1
        if state.backwards_left[stage] == 0 and stage not in self._reduced_by_plan:
            self.handlers[Op.REDUCE_GRAD](Action(stage, Op.REDUCE_GRAD), state)

    def _reduce_gradients(self, action: Action, state: StepState) -> None:
        stage = self.stages[action.stage]
        if stage.replica.is_reduced:
            stage.replica.reduce_gradients()
        if self.added_losses:
            self.added_losses.give_gradients(stage, state.loss_scale)

    def _overlap(self, action: Action, state: StepState) -> None:
        for part in action.parts:
            state.part = part
            self.handlers[part.op](part, state)
        state.part = None


def _unchanged(value: Any) -> Any:
    return value


def finish_together(executors: Sequence[Executor]) -> None:
    """Finish a step on the ranks of one process, after the last action."""
    give_to_inputs([executor.state for executor in executors])
    for executor in executors:
        if executor.state.training:
            executor.ties.finish()


# Custom functions: a user's own way to run an action, such as overlapping a forward and a backward.


@dataclass(frozen=True)
class ActionContext:
    """Second argument of a custom function: the step's data on this rank, and the usual way to run an action."""

    executor: Executor

    @property
    def args(self) -> Sequence[Sequence[Any]]:
        """The positional arguments of each microbatch on the rank of the first stage; empty elsewhere."""
        return self.executor.state.args

    @property
    def kwargs(self) -> Sequence[Mapping[str, Any]]:
        """The keyword arguments of each microbatch; empty if there are none."""
        return self.executor.state.kwargs

    @property
    def targets(self) -> Sequence[Any] | None:
        """The target of each microbatch on the rank of the last stage; None elsewhere."""
        return self.executor.state.targets

    def run(self, action: Action) -> None:
        """Run an action in the usual way."""
        self.executor.usual_handlers[action.op](action, self.executor.state)


CustomFunction = Callable[[Action, ActionContext], None]


def install(executor: Executor, functions: Mapping[Op, CustomFunction]) -> None:
    """Let functions run the actions of their kinds."""
    context = ActionContext(executor)
    for op, function in functions.items():
        executor.handlers[op] = _bound(function, context)


def _bound(function: CustomFunction, context: ActionContext) -> Handler:
    return lambda action, _: function(action, context)


def checked_op(op: Op | str) -> Op:
    """Return the kind of action that `op` is, or that its text or name stands for."""
    known = {each.value: each for each in Op} | {each.name: each for each in Op}
    if str(op) not in known:
        raise InputError(f"there is no action {op!r}: custom functions are for {', '.join(each.name for each in Op)}")
    return known[str(op)]
