"""The one executor: a table from Op to handler, on the actions of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, PipeError
from ...pipe_ir.structure import flatten, map_leaves
from ...stage.peer_surface import returned
from ...stage.stage import Flight, PipelineStage
from ..action import Action, Op
from ..plan import Plan
from .batch import Batch
from .keywords import taken_by
from .mail import Mail, number, sendable
from .objective import Objective
from .parcels import Parcels
from .random_numbers import RandomNumbers
from .results import refuse_unmergeable
from .ties import TiedGradients
from .transport import Meta, Transport

Handler = Callable[[Action], None]


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
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.transport = transport
        self.objective = objective
        self.scale_gradients = scale_gradients
        self.ties = ties
        self.random_numbers = random_numbers
        self.batch = Batch(training=False, samples=[], sizes=[])
        self.mail = Mail(plan, stages, parcels, transport, random_numbers)
        self.root_gradients: list[tuple[Tensor, Tensor]] = []
        self._keywords: dict[tuple[int, int], list[Tensor]] = {}  # those that need a gradient, by stage and microbatch
        self._backwards_left: dict[int, int] = {}
        self.backward_counter: Counter[int] = Counter()  # of stages, for custom functions
        self.part: Action | None = None  # the part of an overlap that is running
        self.in_loss_fn = False
        self.inputs: list[Any] | None = None  # what the forward that is running was called with
        self._targets = {stage: plan.dataflow.users[stage] for stage in stages}
        self._reduced_by_plan = {
            action.stage for row in plan.actions for action in row if action is not None and action.op is Op.REDUCE_GRAD
        }
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
        self.random_numbers.begin(batch.seed)
        self._backwards_left = dict.fromkeys(self.stages, len(batch.samples))
        self.backward_counter.clear()
        if batch.training:
            self.ties.begin()
            for stage in self.stages.values():
                stage.begin_step()
        for stage in self.stages.values():
            stage.driver = self
            stage.has_backward = batch.training

    def clear(self) -> None:
        """Forget everything of the step."""
        self.root_gradients.clear()
        self._keywords.clear()
        self.part = None
        self.in_loss_fn = False
        self.inputs = None
        for stage in self.stages.values():
            stage.clear_runtime_states()
            stage.driver = None
        self.batch = Batch(training=False, samples=[], sizes=[])
        self.mail.begin(self.batch)

    # ------------------------------------------------------------------ forward

    def _forward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], number(action)
        args = self._arguments(stage, microbatch)
        self.inputs = args
        with self.random_numbers.forward(stage, microbatch):
            if stage.ports is None:
                flight = self._forward_with_keywords(stage, microbatch, args)
            else:
                flight = stage.forward(microbatch, args, {}, training=self.batch.training)
            if stage.is_last:
                self._finish(stage, microbatch, flight)
        self.inputs = None
        for target in self._targets[action.stage]:
            self.mail.hand_over(action.stage, target, microbatch, flight)

    def _forward_with_keywords(self, stage: PipelineStage, microbatch: int, args: list[Any]) -> Flight:
        """A module that was cut by hand also takes keywords; those that need a gradient are among its inputs."""
        given = self.batch.kwargs[microbatch] if self.batch.kwargs else {}
        taken = taken_by(stage.submod, len(args), given, training=self.batch.training)
        flight = stage.forward(microbatch, args, taken.kwargs, training=self.batch.training)
        if taken.leaves:
            flight.inputs += taken.leaves
            self._keywords[stage.stage_index, microbatch] = taken.originals
        return flight

    def _arguments(self, stage: PipelineStage, microbatch: int) -> list[Any]:
        """What the stage's module is called with: leaves of a graph of its own."""
        index = stage.stage_index
        if stage.ports is None:
            if stage.is_first:
                return [_leaf(value) for value in self.batch.args[microbatch]]
            arrived_args = self.mail.take(index - 1, index, microbatch)
            _check_expected(stage, arrived_args)
            return arrived_args
        sources = {*stage.ports.incoming, *self.plan.dataflow.makers[index]}
        arrived = {source: self.mail.take(source, index, microbatch) for source in sorted(sources)}
        roots = self.batch.roots[microbatch] if stage.is_first else {}
        return [
            _leaf(roots[place]) if source is None else arrived[source][place] for source, place in stage.ports.arguments
        ]

    def _finish(self, stage: PipelineStage, microbatch: int, flight: Flight) -> None:
        """The end of the model: its result, and the loss."""
        batch = self.batch
        with torch.set_grad_enabled(batch.training):
            self.in_loss_fn = not self.objective.is_own
            target = None if batch.targets is None else batch.targets[microbatch]
            loss = self.objective.loss(flight.result, target, batch.loss_kwargs)
            self.in_loss_fn = False
        if batch.training or loss is not None:
            self._begin_with(self.objective.checked(loss, flight.result, microbatch), stage, microbatch, flight)
        if batch.keep_results:
            result = _detached(flight.result)
            if not batch.results:
                refuse_unmergeable(result, batch, microbatch)
            batch.results[microbatch] = result
        if batch.training:
            flight.result = None

    def _begin_with(self, loss: Tensor, stage: PipelineStage, microbatch: int, flight: Flight) -> None:
        """The backward will begin with this loss."""
        batch = self.batch
        if batch.training and not loss.requires_grad and _needs_gradient(stage, flight):
            maker = "the model" if self.objective.is_own else "loss_fn"
            raise InputError(
                f"the loss needs no gradient, though parameters do: {maker} must not detach the output, nor run under "
                "torch.no_grad()"
            )
        if self.objective.is_own:
            leaves, _ = flatten(flight.result)
            batch.loss_place = next((place for place, leaf in enumerate(leaves) if leaf is loss), None)
        # A copy: a reduced loss may lie in a storage as large as the output.
        batch.losses[microbatch] = loss.detach().clone()
        # The mean of nothing, which has no weight, is NaN, and so would be nothing times its gradient.
        has_weight = batch.loss_weights[microbatch] > 0 or not self.scale_gradients
        flight.loss = loss if has_weight else batch.losses[microbatch]

    # ------------------------------------------------------------------ backward

    def _full_backward(self, action: Action) -> None:
        self.backward_counter[action.stage] += 1
        self._backward(action, weights=True)
        self._count_backward(action.stage)

    def _backward_input(self, action: Action) -> None:
        self._backward(action, weights=False)

    def _backward_weight(self, action: Action) -> None:
        self.backward_counter[action.stage] += 1
        self.stages[action.stage].weight_backward(number(action))
        self._count_backward(action.stage)

    def _count_backward(self, stage: int) -> None:
        """After the last backward of a stage its gradients are reduced, unless the plan says when."""
        self._backwards_left[stage] -= 1
        if self._backwards_left[stage] == 0 and stage not in self._reduced_by_plan:
            self.stages[stage].replica.reduce_gradients()

    def _backward(self, action: Action, *, weights: bool) -> None:
        stage, microbatch = self.stages[action.stage], number(action)
        grads = self._output_gradients(stage, microbatch)
        inputs = stage.flights[microbatch].inputs
        input_grads = stage.backward(microbatch, grads, weights=weights)
        originals = self._keywords.pop((action.stage, microbatch), [])
        count = len(inputs) - len(originals)
        for original, grad in zip(originals, input_grads[count:], strict=True):
            self._into_root(original, grad)
        self._give_back(stage, microbatch, inputs[:count], input_grads[:count])

    def _output_gradients(self, stage: PipelineStage, microbatch: int) -> list[Tensor | None]:
        """What the stages that use this one's outputs send back, summed; for the loss its weight."""
        flight = stage.flights[microbatch]
        if flight.loss is not None:
            weight = self.batch.weight(microbatch) if self.scale_gradients else 1.0
            return [torch.full_like(flight.loss, weight)]
        sums: list[Tensor | None] = [None] * len(flight.outputs)
        # The last user first, as autograd sums in one graph.
        for user in reversed(self._targets[stage.stage_index]):
            given = self.mail.take_gradients(user, stage.stage_index, microbatch)
            if given is not None:
                self._add_up(stage, user, microbatch, given, sums)
        return sums

    def _add_up(
        self, stage: PipelineStage, user: int, microbatch: int, grads: list[Tensor], sums: list[Tensor | None]
    ) -> None:
        ends = (stage.stage_index, user)
        places = [place for place, meta in enumerate(self.mail.metas(ends, microbatch)) if meta.requires_grad]
        for place, grad in zip(places, grads, strict=True):
            output, root = (place, None)
            if stage.ports is not None:
                item = stage.ports.outgoing[user][place]
                output, root = item.output, item.root  # type: ignore[assignment]
            if root is not None:
                self._into_root(self.batch.roots[microbatch][root], grad)
            else:
                already = sums[output]
                sums[output] = grad if already is None else already + grad

    def _give_back(
        self, stage: PipelineStage, microbatch: int, inputs: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> None:
        """Send the gradients of the inputs to the stages that made them."""
        index = stage.stage_index
        if stage.is_first:
            originals = self._originals(stage, microbatch)
            for original, grad in zip(originals, grads, strict=True):
                self._into_root(original, grad)
            return
        sources = [index - 1] if stage.ports is None else list(stage.ports.incoming)
        for source in sources:
            places = range(len(inputs))
            if stage.ports is not None:
                by_place = {at: nth for nth, (origin, at) in enumerate(stage.ports.arguments) if origin == source}
                places = [by_place[at] for at in range(len(by_place))]  # type: ignore[assignment]
            metas = self.mail.metas((source, index), microbatch)
            parcel = [
                _gradient(inputs[place], grads[place])
                for place, meta in zip(places, metas, strict=True)
                if meta.requires_grad
            ]
            if parcel:
                self.mail.give_back(index, source, microbatch, parcel)

    def _into_root(self, original: Any, grad: Tensor | None) -> None:
        """Keep the gradient of an input of the model for the end of the step."""
        if grad is not None and isinstance(original, Tensor) and original.requires_grad:
            self.root_gradients.append((original, grad))

    def finish(self) -> None:
        """The end of the step on this rank."""
        finish_together([self])

    def _originals(self, stage: PipelineStage, microbatch: int) -> list[Any]:
        if stage.ports is None:
            return list(self.batch.args[microbatch])
        return [self.batch.roots[microbatch][place] for _, place in stage.ports.arguments]

    # ------------------------------------------------------------------ one at a time, for custom functions

    def forward_one(self, stage: int, microbatch: int) -> Any:
        """Run a forward, and return what the module returned."""
        self._forward(Action(stage, Op.FORWARD, microbatch))
        flight = self.stages[stage].flights.get(microbatch)
        if flight is None or self.stages[stage].is_last:
            return self.batch.results.get(microbatch)
        return returned(self.stages[stage], flight)

    def backward_one(self, stage: int, microbatch: int, *, weights: bool) -> None:
        """Run a backward; a custom function counts it by itself."""
        self._backward(Action(stage, Op.FULL_BACKWARD, microbatch), weights=weights)
        if weights:
            self._count_backward(stage)

    def weight_one(self, stage: int, microbatch: int) -> None:
        """Run the rest of a backward; a custom function counts it by itself."""
        self.stages[stage].weight_backward(microbatch)
        self._count_backward(stage)

    def _overlap(self, action: Action) -> None:
        for self.part in action.parts:
            self.handlers[self.part.op](self.part)
        self.part = None


def finish_together(executors: Sequence[Executor]) -> None:
    """The end of a step on the ranks of one process: gradients of inputs go on to wherever the user got them from.

    In one go, for the microbatches of an input, and inputs of several stages, may share a graph, which is gone after
    the first backward.
    """
    found = [pair for executor in executors for pair in executor.root_gradients]
    if found:
        tensors, grads = zip(*found, strict=True)
        torch.autograd.backward(tensors, grads)
    for executor in executors:
        if executor.batch.training:
            executor.ties.finish()


def _check_expected(stage: PipelineStage, arrived: Sequence[Tensor]) -> None:
    """What arrives fits the example that the stage was made with; the number of samples may be another."""
    if stage.input_args is None:
        return
    expected = [Meta.of(example) for example in stage.input_args]
    got = [Meta.of(value) for value in arrived]
    if [(meta.shape[1:], meta.dtype) for meta in expected] != [(meta.shape[1:], meta.dtype) for meta in got]:
        source = stage.stage_index - 1
        raise PipeError(
            f"stage {stage.stage_index} was made for input_args {', '.join(map(str, expected))}, and gets "
            f"{', '.join(map(str, got))} from stage {source}: check what stage {source} returns"
        )


def _leaf(value: Any) -> Any:
    """A tensor at which the graph of a stage begins."""
    if not isinstance(value, Tensor):
        return value
    # Microbatches are parts of one tensor: with `detach()` a module that writes to its part would change them all in
    # the eyes of autograd, and the backward of those before it would be refused.
    return value.detach().requires_grad_() if value.requires_grad else value.data


def _needs_gradient(stage: PipelineStage, flight: Flight) -> bool:
    inputs = any(isinstance(value, Tensor) and value.requires_grad for value in flight.inputs)
    return inputs or bool(stage.weights.parameters)


def _gradient(value: Tensor, grad: Tensor | None) -> Tensor:
    """What is sent back for an input: zeros if nothing depended on it, for the other side waits for it."""
    return torch.zeros_like(value, memory_format=torch.contiguous_format) if grad is None else sendable(grad)


def _detached(result: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result, holders=True)
