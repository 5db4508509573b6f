"""Routing of gradients between stages and to the model's inputs; gradients of losses of parameters alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, PipeError
from ..pipe_ir import map_leaves
from ..stage import (
    Flight,
    MeshLayout,
    PipelineStage,
    UnwrappedNames,
    describe_tensor,
    full_tensor,
    place_like,
    ready_to_send,
)
from ..text import shape_text
from ..torch_internals import version_of
from .mail import Mail, sendable
from .state import StepState
from .ties import Tie


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
        # Of DTensors that were sent back: by their stage, the one that made the value, and the place in the parcel.
        self._placements: dict[tuple[int, int, int], tuple[Any, ...]] = {}

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
        contents = self.mail.contents((source, index), microbatch, state)
        arguments = None if stage.ports is None else stage.ports.argument_of[source]
        layouts = [] if contents.is_plain else self.mail.gradient_layouts(index, source, microbatch, state)
        parcel = []
        for nth, place in enumerate(contents.gradient_places):
            argument = place if arguments is None else arguments[place]
            value, grad = inputs[argument], grads[argument]
            layout = layouts[nth] if layouts else None
            if layout is None and not contents.is_plain:
                layout = self._layout_of_zeros(value, (index, source, nth), grad)
            parcel.append(_gradient(value, grad, layout, index, source))
        if parcel:
            self.mail.give_back(index, source, microbatch, parcel, state)

    def _layout_of_zeros(self, value: Tensor, key: tuple[int, int, int], grad: Tensor | None) -> MeshLayout | None:
        """Return how zeros have to lie that stand for no gradient: as gradients did in microbatches of other sizes.

        The gradients of parameters lie on the mesh as those of outputs let them, and all microbatches are added up.
        """
        if grad is None:
            lies = MeshLayout.of(value)
            return None if lies is None else lies._replace(placements=self._placements.get(key, lies.placements))
        if type(grad) is not Tensor:
            made = MeshLayout.of(grad)
            if made is not None:
                self._placements.setdefault(key, made.placements)
        return None

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


# Gradients of a step that fails.


def note_gradients(parameters: Iterable[Tensor], state: StepState) -> None:
    """Note the gradients that parameters have before a step: references, which cost no memory."""
    grads = [(parameter, parameter.grad) for parameter in parameters]
    state.gradients_before += [(each, grad, 0 if grad is None else version_of(grad)) for each, grad in grads]


def restore_gradients(states: Iterable[StepState]) -> str:
    """Give parameters the gradients from before a step that failed; say in words of which ones that is not possible.

    One that was there before is added to in place. A copy of it in every step would cost as much memory as all
    gradients.
    """
    changed = 0
    for state in states:
        for parameter, before, version in state.gradients_before:
            parameter.grad = before
            changed += before is not None and version_of(before) != version
        state.gradients_before = []
    if not changed:
        return ""
    return (
        f". Gradients of earlier steps had been kept, and this one has added a part of its own to {changed} of them on "
        "this rank: call zero_grad() before the next step"
    )


def _gradient(value: Tensor, grad: Tensor | None, layout: MeshLayout | None, stage: int, source: int) -> Tensor:
    """Return what is sent back for an input: zeros if nothing depended on it, for the other side waits for it.

    A DTensor goes back as it was made, a partial sum as one; those after the first one of its kind lie as that did.
    """
    if grad is None:
        grad = torch.zeros_like(value, memory_format=torch.contiguous_format)
    if type(grad) is Tensor and type(value) is Tensor:
        return sendable(grad)
    lies, came = MeshLayout.of(value), MeshLayout.of(grad)
    if (lies and lies.mesh) != (came and came.mesh):
        raise PipeError(
            f"the gradient that stage {stage} gives back for a value of stage {source} is {describe_tensor(grad)}, and "
            f"the value is {describe_tensor(value)}: the gradient of a DTensor is one on the same mesh, and that of a "
            "plain tensor is plain; look for a hook, or a backward, that converts it"
        )
    return ready_to_send(grad if layout is None else place_like(layout, grad))


# Losses of parameters alone, such as a regularisation, which each stage computes from its own: in loss_fn they could
# reach the parameters of the last stage's rank only.


LossTerm = Callable[[Mapping[str, Tensor]], Any]


class AddedLosses:
    """Functions of parameters by name, each called once per step with those of each stage.

    A tied parameter is among those of the first stage that holds it, and its gradient goes to all of them.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 1, bias=False)
    >>> added = AddedLosses([], ())
    >>> added.add(lambda parameters: 0.5 * sum(each.pow(2).sum() for each in parameters.values()))
    >>> added.give_gradients(PipelineStage(layer, 0, 1, "cpu"))
    >>> torch.equal(layer.weight.grad, layer.weight)
    True
    """

    def __init__(self, terms: list[LossTerm], ties: Iterable[Tie]) -> None:
        self._terms = terms
        self._ties = tuple(ties)
        self._values: dict[int, Tensor] = {}  # by stage, of the last training step

    def __len__(self) -> int:
        return len(self._terms)

    def add(self, term: LossTerm) -> None:
        """Add a loss."""
        if not callable(term):
            raise InputError(
                f"add_loss() takes a function of a dict of parameters that returns a number, got {type(term).__name__}"
            )
        self._terms.append(term)

    def begin(self) -> None:
        """Forget the values of the step before."""
        self._values = {}

    def total(self, stages: Iterable[int]) -> float:
        """Return the sum of the losses of some stages in the last training step."""
        return sum(float(self._values[stage]) for stage in stages if stage in self._values)

    def give_gradients(self, stage: PipelineStage, scale: Tensor | None = None) -> None:
        """Add the gradients of the losses to the parameters of a stage, after all that its microbatches gave.

        `scale` is the factor of all losses, if they are scaled.
        """
        named = self._counted(stage)
        trained = [parameter for parameter in named.values() if parameter.requires_grad]
        with torch.enable_grad():
            losses = [_checked(term(dict(named)), stage.stage_index) for term in self._terms]
            total = sum(losses[1:], losses[0])
        if total.requires_grad:
            scaled = total if scale is None else total * scale.to(total.device)
            _add(trained, torch.autograd.grad(scaled, trained, allow_unused=True))
        self._values[stage.stage_index] = full_tensor(total.detach())

    def _counted(self, stage: PipelineStage) -> dict[str, Tensor]:
        """Return the parameters of a stage by their names in the model, without those that an earlier stage counts."""
        index = stage.stage_index
        here = {index: stage}
        elsewhere = {
            id(parameter)
            for tie in self._ties
            if index in tie.stages and tie.stages[0] != index
            for _, parameter in tie.held(here)
        }
        parameters = stage.submod.named_parameters()
        names = UnwrappedNames(stage.submod)
        return {names.of(name): each for name, each in parameters if id(each) not in elsewhere}


def _checked(loss: Any, stage: int) -> Tensor:
    if isinstance(loss, int | float):  # the sum over no parameters
        return torch.tensor(float(loss))
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"a tensor of shape {shape_text(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"a function of add_loss() returned {got} for stage {stage}: it must return one number")
    return loss


@torch.no_grad()
def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        layout = MeshLayout.of(parameter)
        placed = gradient if layout is None else place_like(layout, gradient)
        if parameter.grad is None:
            parameter.grad = placed.clone()  # that of a sum has one element for all
        else:
            parameter.grad += placed
