"""Where gradients go: to the stages that made the values, and to the inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import PipeError
from ..pipe_ir import map_leaves
from ..stage import Flight, MeshLayout, PipelineStage, describe_tensor, place_like, ready_to_send
from .mail import Mail
from .state import Batch

# MERGED: Tensors at which the graph of a stage begins: they stand for those that the stage is called with.


def graph_leaf(value: Any) -> Any:
    """A tensor without the graph that it comes from; other values as they are.

    That graph may be one of all microbatches, which can be gone through once only.
    """
    if not isinstance(value, Tensor):
        return value
    # Microbatches are parts of one tensor: with `detach()` a module that writes to its part would change them all in
    # the eyes of autograd, and the backward of those before it would be refused.
    return value.detach().requires_grad_() if value.requires_grad else value.data


@dataclass(frozen=True)
class InnerLeaves:
    """Leaves for the tensors inside of nested values. `leaves` stand for those of `originals`, which need a gradient.

    >>> import torch
    >>> inner, weight = InnerLeaves(), torch.ones(2, requires_grad=True)
    >>> given = {"weights": [weight * 2], "name": "x"}
    >>> taken = inner.put_into(given)
    >>> taken["weights"][0] is inner.leaves[0], given["weights"][0] is inner.originals[0]
    (True, True)
    """

    originals: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)

    def put_into(self, value: Any) -> Any:
        """The value with leaves in the place of its tensors."""
        return map_leaves(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        leaf = graph_leaf(value)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            self.originals.append(value)
            self.leaves.append(leaf)
        return leaf


class Gradients:
    """The gradients that the stages of one rank take and give in a step."""

    def __init__(self, mail: Mail, users: Mapping[int, Sequence[int]]) -> None:
        self.mail = mail
        self.users = users
        self.batch = Batch(training=False, samples=[], sizes=[])
        self.of_inputs: list[tuple[Tensor, Tensor]] = []  # the inputs of the model, and what they get at the end
        self._inner: dict[tuple[int, int], list[Tensor]] = {}  # by stage and microbatch: what inner leaves stand for

    def begin(self, batch: Batch) -> None:
        """Start a step with nothing left of the one before."""
        self.of_inputs.clear()
        self._inner.clear()
        self.batch = batch

    def expect(self, stage: int, microbatch: int, inner: InnerLeaves, flight: Flight) -> None:
        """The leaves inside of the arguments of a call are among the inputs, after the arguments themselves."""
        flight.inputs += inner.leaves
        self._inner[stage, microbatch] = inner.originals

    def of_outputs(self, stage: PipelineStage, microbatch: int) -> list[Tensor | None]:
        """What the stages that use this one's outputs send back, summed."""
        sums: list[Tensor | None] = [None] * len(stage.flights[microbatch].outputs)
        # The last user first, as autograd sums in one graph.
        for user in reversed(self.users[stage.stage_index]):
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
                self._keep(self.batch.roots[microbatch][root], grad)
            else:
                already = sums[output]
                sums[output] = grad if already is None else already + grad

    def give_back(
        self, stage: PipelineStage, microbatch: int, inputs: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> None:
        """Send the gradients of the inputs to the stages that made them."""
        index = stage.stage_index
        originals = self._inner.pop((index, microbatch), None)
        if originals:
            count = len(inputs) - len(originals)
            for original, grad in zip(originals, grads[count:], strict=True):
                self._keep(original, grad)
            inputs, grads = inputs[:count], grads[:count]
        if stage.is_first:
            for original, grad in zip(self._originals(stage, microbatch), grads, strict=True):
                self._keep(original, grad)
            return
        for source in [index - 1] if stage.ports is None else list(stage.ports.incoming):
            self._send_back(stage, source, microbatch, inputs, grads)

    def _send_back(
        self, stage: PipelineStage, source: int, microbatch: int, inputs: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> None:
        index = stage.stage_index
        places: Sequence[int] = range(len(inputs))
        if stage.ports is not None:
            by_place = {at: nth for nth, (origin, at) in enumerate(stage.ports.arguments) if origin == source}
            places = [by_place[at] for at in range(len(by_place))]
        metas = self.mail.metas((source, index), microbatch)
        parcel = [
            _gradient(inputs[place], grads[place], index, source)
            for place, meta in zip(places, metas, strict=True)
            if meta.requires_grad
        ]
        if parcel:
            self.mail.give_back(index, source, microbatch, parcel)

    def _originals(self, stage: PipelineStage, microbatch: int) -> list[Any]:
        if stage.ports is None:
            return list(self.batch.args[microbatch])
        return [self.batch.roots[microbatch][place] for _, place in stage.ports.arguments]

    def _keep(self, original: Any, grad: Tensor | None) -> None:
        """Keep the gradient of an input of the model for the end of the step."""
        if grad is not None and isinstance(original, Tensor) and original.requires_grad:
            self.of_inputs.append((original, grad))


def give_to_inputs(every: Sequence[Gradients]) -> None:
    """The gradients of the inputs of the model go on to wherever the user got them from.

    In one go, for the microbatches of an input, and inputs of several stages, may share a graph, which is gone after
    the first backward.
    """
    found = [pair for gradients in every for pair in gradients.of_inputs]
    if found:
        tensors, grads = zip(*found, strict=True)
        torch.autograd.backward(tensors, grads)


def _gradient(value: Tensor, grad: Tensor | None, stage: int, source: int) -> Tensor:
    """What is sent back for an input: zeros if nothing depended on it, for the other side waits for it."""
    if grad is None:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    lies, came = MeshLayout.of(value), MeshLayout.of(grad)
    if (lies and lies.mesh) != (came and came.mesh):
        raise PipeError(
            f"the gradient that stage {stage} gives back for a value of stage {source} is {describe_tensor(grad)}, and "
            f"the value is {describe_tensor(value)}: the gradient of a DTensor is one on the same mesh, and that of a "
            "plain tensor is plain; look for a hook, or a backward, that converts it"
        )
    return ready_to_send(grad if lies is None else place_like(lies.of_gradient, grad))
