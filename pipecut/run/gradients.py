"""Routing of gradients between stages and to the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import PipeError
from ..pipe_ir import map_leaves
from ..stage import Flight, MeshLayout, PipelineStage, describe_tensor, place_like, ready_to_send
from .mail import Mail, sendable
from .state import StepState


def graph_leaf(value: Any) -> Any:
    """Return a tensor without the graph that it comes from; other values as they are.

    That graph may be one of all microbatches, which can be gone through once only.
    """
    if not isinstance(value, Tensor):
        return value
    # Microbatches are parts of one tensor: with `detach()` a module that writes to its part would change them all in
    # the eyes of autograd, and the backward of those before it would raise an error.
    return value.detach().requires_grad_() if value.requires_grad else value.data


@dataclass(frozen=True)
class NestedLeaves:
    """Graph leaves for the tensors in nested values: `leaves` stand for `originals`, which need a gradient.

    >>> import torch
    >>> nested, weight = NestedLeaves(), torch.ones(2, requires_grad=True)
    >>> given = {"weights": [weight * 2], "name": "x"}
    >>> taken = nested.put_into(given)
    >>> taken["weights"][0] is nested.leaves[0], given["weights"][0] is nested.originals[0]
    (True, True)
    """

    originals: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)

    def put_into(self, value: Any) -> Any:
        """Return the value with graph leaves in the place of its tensors."""
        return map_leaves(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        leaf = graph_leaf(value)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            self.originals.append(value)
            self.leaves.append(leaf)
        return leaf


class Gradients:
    """Collects and passes on the gradients of the values between stages, for the stages of one rank."""

    def __init__(self, mail: Mail, users: Mapping[int, Sequence[int]]) -> None:
        self.mail = mail
        self.users = users

    def expect_nested(
        self, stage: int, microbatch: int, nested: NestedLeaves, flight: Flight, state: StepState
    ) -> None:
        """Count the leaves inside of the arguments of a call among its inputs, after the arguments themselves."""
        flight.inputs += nested.leaves
        state.nested_inputs[stage, microbatch] = nested.originals

    def of_outputs(self, stage: PipelineStage, microbatch: int, state: StepState) -> list[Tensor | None]:
        """Return the sums of what the stages that use this one's outputs have sent back."""
        index = stage.stage_index
        sums: list[Tensor | None] = [None] * len(stage.flights[microbatch].outputs)
        # The last user first, as autograd sums in one graph.
        for user in reversed(self.users[index]):
            arrival = state.gradients.pop((user, index, microbatch), None)
            if arrival is not None:
                self._add(stage, user, microbatch, arrival.wait(), sums, state)
        return sums

    def _add(
        self,
        stage: PipelineStage,
        user: int,
        microbatch: int,
        grads: Sequence[Tensor],
        sums: list[Tensor | None],
        state: StepState,
    ) -> None:
        places = self.mail.contents((stage.stage_index, user), microbatch, state).gradient_places
        items = None if stage.ports is None else stage.ports.outgoing[user]
        for place, grad in zip(places, grads, strict=True):
            output = place if items is None else items[place].output
            if output is None:
                assert items is not None  # an input of the model that goes on to another stage
                self._keep(state.roots[microbatch][items[place].root], grad, state)  # type: ignore[index]
            else:
                already = sums[output]
                sums[output] = grad if already is None else already + grad

    def give_back(
        self,
        stage: PipelineStage,
        microbatch: int,
        inputs: Sequence[Any],
        grads: Sequence[Tensor | None],
        state: StepState,
    ) -> None:
        """Send the gradients of the inputs to the stages that made them."""
        index = stage.stage_index
        originals = state.nested_inputs.pop((index, microbatch), None)
        if originals:
            count = len(inputs) - len(originals)
            for original, grad in zip(originals, grads[count:], strict=True):
                self._keep(original, grad, state)
            inputs, grads = inputs[:count], grads[:count]
        if not stage.is_first:
            for source in [index - 1] if stage.ports is None else stage.ports.incoming:
                self._send_back(stage, source, microbatch, inputs, grads, state)
            return
        for place, grad in enumerate(grads):
            if grad is not None:
                self._keep(_model_input(stage, place, microbatch, state), grad, state)

    def _send_back(
        self,
        stage: PipelineStage,
        source: int,
        microbatch: int,
        inputs: Sequence[Any],
        grads: Sequence[Tensor | None],
        state: StepState,
    ) -> None:
        index = stage.stage_index
        places = self.mail.contents((source, index), microbatch, state).gradient_places
        arguments = None if stage.ports is None else stage.ports.argument_of[source]
        parcel = []
        for place in places:
            argument = place if arguments is None else arguments[place]
            parcel.append(_gradient(inputs[argument], grads[argument], index, source))
        if parcel:
            self.mail.give_back(index, source, microbatch, parcel, state)

    def _keep(self, original: Any, grad: Tensor | None, state: StepState) -> None:
        """Keep the gradient of an input of the model for the end of the step."""
        if grad is not None and isinstance(original, Tensor) and original.requires_grad:
            state.input_gradients.append((original, grad))


def _model_input(stage: PipelineStage, place: int, microbatch: int, state: StepState) -> Any:
    if stage.ports is None:
        return state.args[microbatch][place]
    return state.roots[microbatch][stage.ports.arguments[place][1]]


def give_to_inputs(states: Sequence[StepState]) -> None:
    """Pass the gradients of the inputs of the model on to the graphs that the inputs came from.

    In one go, for the microbatches of an input, and inputs of several stages, may share a graph, which is gone after
    the first backward.
    """
    found = [pair for state in states for pair in state.input_gradients]
    if found:
        tensors, grads = zip(*found, strict=True)
        torch.autograd.backward(tensors, grads)


def _gradient(value: Tensor, grad: Tensor | None, stage: int, source: int) -> Tensor:
    """Return what is sent back for an input: zeros if nothing depended on it, for the other side waits for it."""
    if grad is None:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if type(grad) is Tensor and type(value) is Tensor:
        return sendable(grad)
    lies, came = MeshLayout.of(value), MeshLayout.of(grad)
    if (lies and lies.mesh) != (came and came.mesh):
        raise PipeError(
            f"the gradient that stage {stage} gives back for a value of stage {source} is {describe_tensor(grad)}, and "
            f"the value is {describe_tensor(value)}: the gradient of a DTensor is one on the same mesh, and that of a "
            "plain tensor is plain; look for a hook, or a backward, that converts it"
        )
    return ready_to_send(grad if lies is None else place_like(lies.of_gradient, grad))
