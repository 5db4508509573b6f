"""The one executor: a table from Op to handler, on the actions of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..schedule import Action, Dataflow, Op, Plan
from ..stage import PipelineStage
from .examples import check_arrived
from .gradients import Gradients, InnerLeaves, give_to_inputs, graph_leaf
from .last_stage import Ending
from .loss import Objective
from .mail import Mail, number
from .parcels import Parcels
from .random_numbers import RandomNumbers
from .state import Batch, taken_by
from .ties import TiedGradients
from .transport.base import Transport

# MERGED: What the module of a stage is called with: what was given to the step, and what other stages sent.


class _StageCall(NamedTuple):
    """The call of a stage's module, on leaves of its own graph; `inner` are those in nested values and keywords."""

    args: list[Any]
    kwargs: Mapping[str, Any]
    inner: InnerLeaves | None = None


class Arguments:
    """Makes the calls of one rank's stages."""

    def __init__(self, mail: Mail, dataflow: Dataflow) -> None:
        self.mail = mail
        self.dataflow = dataflow

    def of(self, stage: PipelineStage, microbatch: int, batch: Batch) -> _StageCall:
        """The call for one microbatch."""
        if stage.ports is None:
            return self._by_hand(stage, microbatch, batch)
        index = stage.stage_index
        sources = {*stage.ports.incoming, *self.dataflow.makers[index]}
        arrived = {source: self.mail.take(source, index, microbatch) for source in sorted(sources)}
        roots = batch.roots[microbatch] if stage.is_first else {}
        args = [
            graph_leaf(roots[place]) if source is None else arrived[source][place]
            for source, place in stage.ports.arguments
        ]
        return _StageCall(args, {})

    def _by_hand(self, stage: PipelineStage, microbatch: int, batch: Batch) -> _StageCall:
        """A module that was cut by hand takes keywords too, and the first one nested values."""
        inner = InnerLeaves()
        enter = inner.put_into if batch.training else _as_it_is
        if stage.is_first:
            args = [
                graph_leaf(value) if isinstance(value, Tensor) else enter(value) for value in batch.args[microbatch]
            ]
        else:
            args = self.mail.take(stage.stage_index - 1, stage.stage_index, microbatch)
            check_arrived(stage, args)
        given = batch.kwargs[microbatch] if batch.kwargs else {}
        kwargs = enter(taken_by(stage.submod, len(args), given)) if given else {}
        return _StageCall(args, kwargs, inner if inner.leaves else None)


def _as_it_is(value: Any) -> Any:
    return value


Handler = Callable[[Action], None]


class Observer(Protocol):
    """Follows the steps of a schedule, on each rank of this process."""

    def begin(self, executor: Executor) -> None:
        """Note that a step begins; an error raised here ends it before its first action."""

    def after_backward(self, stage: int) -> None:
        """Note that one microbatch has all of its gradients on a stage."""

    def end(self, executor: Executor) -> None:
        """Note that a step has ended, or failed; its data is dropped right after."""


class Executor:
    """Does what a plan says for the stages of one rank, one action at a time.

    Receives are posted ahead of their turn, as far as it is known what will arrive, and waited for when a computation
    needs them.
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
        observer: Observer | None,
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.transport = transport
        self.ties = ties
        self.random_numbers = random_numbers
        self.batch = Batch(training=False, samples=[], sizes=[])
        self.mail = Mail(plan, stages, parcels, transport, random_numbers)
        self.arguments = Arguments(self.mail, plan.dataflow)
        self.gradients = Gradients(self.mail, {stage: plan.dataflow.users[stage] for stage in stages})
        self.ending = Ending(objective, scale_gradients=scale_gradients)
        self._backwards_left: dict[int, int] = {}
        self.observer = observer
        self.part: Action | None = None  # the part of an overlap that is running
        self.inputs: list[Any] | None = None  # what the forward that is running was called with
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
            Op.UNSHARD: lambda action: self.stages[action.stage].replica.unshard(),
            Op.RESHARD: lambda action: self.stages[action.stage].replica.reshard(),
            Op.REDUCE_GRAD: lambda action: self.stages[action.stage].replica.reduce_gradients(),
            Op.REDUCE_TIES: lambda action: self.ties.sum(action.microbatch or 0),
            Op.OVERLAP_F_B: self._overlap,
        }
        self.usual_handlers = dict(self.handlers)

    def begin(self, batch: Batch) -> None:
        """Start a step."""
        self.clear()
        self.batch = batch
        self.mail.begin(batch)
        self.gradients.begin(batch)
        self.random_numbers.begin(batch.seed)
        self._backwards_left = dict.fromkeys(self.stages, len(batch.samples))
        if batch.training:
            self.ties.begin()
            for stage in self.stages.values():
                stage.begin_step(splits_backward=self._splits_backward or self.handlers != self.usual_handlers)
        if self.observer is not None:
            self.observer.begin(self)

    def clear(self) -> None:
        """Forget everything of the step."""
        self.part = None
        self.ending.in_loss_fn = False
        self.inputs = None
        for stage in self.stages.values():
            stage.clear()
        if self.observer is not None:
            self.observer.end(self)
        self.batch = Batch(training=False, samples=[], sizes=[])
        self.mail.begin(self.batch)
        self.gradients.begin(self.batch)

    def _forward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], number(action)
        call = self.arguments.of(stage, microbatch, self.batch)
        self.inputs = call.args
        with self.random_numbers.forward(stage, microbatch):
            flight = stage.forward(microbatch, call.args, call.kwargs, training=self.batch.training)
            if call.inner is not None:
                self.gradients.expect(action.stage, microbatch, call.inner, flight)
            if stage.is_last:
                self.ending.reach(stage, microbatch, flight, self.batch)
        self.inputs = None
        for target in self.gradients.users[action.stage]:
            self.mail.hand_over(action.stage, target, microbatch, flight)

    def _full_backward(self, action: Action) -> None:
        self._backward(action, weights=True)
        self._count_backward(action.stage)

    def _backward_input(self, action: Action) -> None:
        self._backward(action, weights=False)

    def _backward_weight(self, action: Action) -> None:
        self.stages[action.stage].weight_backward(number(action))
        self._count_backward(action.stage)

    def _count_backward(self, stage: int) -> None:
        """After the last backward of a stage its gradients are reduced, unless the plan says when."""
        if self.observer is not None:
            self.observer.after_backward(stage)
        self._backwards_left[stage] -= 1
        if self._backwards_left[stage] == 0 and stage not in self._reduced_by_plan:
            self.handlers[Op.REDUCE_GRAD](Action(stage, Op.REDUCE_GRAD))

    def _backward(self, action: Action, *, weights: bool) -> None:
        stage, microbatch = self.stages[action.stage], number(action)
        flight = stage.flights[microbatch]
        if flight.loss is None:
            grads = self.gradients.of_outputs(stage, microbatch)
        else:
            grads = [self.ending.gradient(flight.loss, microbatch, self.batch)]
        inputs = flight.inputs
        self.gradients.give_back(stage, microbatch, inputs, stage.backward(microbatch, grads, weights=weights))

    def finish(self) -> None:
        """The end of the step on this rank."""
        finish_together([self])

    def _overlap(self, action: Action) -> None:
        for self.part in action.parts:
            self.handlers[self.part.op](self.part)
        self.part = None


def finish_together(executors: Sequence[Executor]) -> None:
    """The end of a step on the ranks of one process."""
    give_to_inputs([executor.gradients for executor in executors])
    for executor in executors:
        if executor.batch.training:
            executor.ties.finish()
