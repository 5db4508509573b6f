"""Runs the stages of a pipe each in an autograd graph of its own, as on separate ranks, without any process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipecut.pipe import Pipe
from pipecut.pipe_ir import Edge
from pipecut.pipe_ir.inputs import bind_inputs
from tests.support.nested_values import Call, tensors_in


def backward_from(output: Any) -> None:
    """Backward from a loss in which every element of every output has a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    losses = [
        (tensor * torch.rand(tensor.shape, generator=generator).to(tensor.dtype)).sum()
        for tensor in tensors_in(output)
        if tensor.requires_grad
    ]
    if losses:
        torch.stack([loss.double() for loss in losses]).sum().backward()


class SeparateRanks:
    """Runs the stages of a pipe with nothing between them but copies of the tensors that the edges name."""

    def __init__(self, pipe: Pipe, call: Call) -> None:
        self.pipe = pipe
        self.roots = bind_inputs(pipe.traced.call, *call)
        self.sizes = pipe.sizes(*call[0], **call[1])
        self.edges = {(edge.target, edge.value): edge for edge in pipe.edges}
        # The first rank sends the model's inputs on before it runs.
        self.sent = {edge: sent_copy(self.roots[edge.value], edge) for edge in pipe.edges if edge.kind == "root input"}
        self.made: list[dict[int, Tensor]] = []

    def forward(self) -> Any:
        result: Any = None
        for info, stage in zip(self.pipe.stage_infos, self.pipe.stages, strict=True):
            result = stage(*(self._received(info.index, value) for value in info.inputs))
            if info.index == self.pipe.num_stages - 1:
                break
            made = () if result is None else (result,) if len(info.outputs) == 1 else result
            self.made.append(dict(zip(info.outputs, made, strict=True)))
            for edge in self.pipe.edges:
                if edge.kind == "activation" and edge.source == info.index:
                    self._check(edge, self.made[-1][edge.value])
                    self.sent[edge] = sent_copy(self.made[-1][edge.value], edge)
        return result

    def _received(self, stage: int, value: int) -> Tensor:
        edge = self.edges.get((stage, value))
        return self.roots[value] if edge is None else self.sent[edge]

    def _check(self, edge: Edge, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), f"{edge} is sent with strides {tensor.stride()}"
        spec = edge.spec.bind(self.sizes)
        actual = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        assert actual == (spec.shape, spec.dtype, spec.requires_grad), f"{edge} is sent as {actual}"

    def backward(self, output: Any) -> None:
        backward_from(output)
        for stage in reversed(range(len(self.made))):
            if stage == 0:
                self._return_root_gradients()
            tensors, gradients = [], []
            for value, tensor in self.made[stage].items():
                gradient = self._gradient(value, "activation", stage)
                if gradient is not None:
                    tensors.append(tensor)
                    gradients.append(gradient)
            if tensors:
                torch.autograd.backward(tensors, gradients)

    def _return_root_gradients(self) -> None:
        for value, tensor in self.roots.items():
            gradient = self._gradient(value, "root input", 0)
            if gradient is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

    def _gradient(self, value: int, kind: str, source: int) -> Tensor | None:
        """The sum over all users of a value, the last user first, as autograd sums in one graph."""
        users = [edge for edge in self.sent if (edge.value, edge.kind, edge.source) == (value, kind, source)]
        total: Tensor | None = None
        for edge in sorted(users, key=lambda edge: -edge.target):
            gradient = self.sent[edge].grad
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total


def sent_copy(tensor: Tensor, edge: Edge) -> Tensor:
    """The tensor as another rank receives it."""
    copied_tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copied_tensor.requires_grad_(edge.spec.requires_grad)
