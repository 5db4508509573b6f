"""A walk through the stages of a model on example inputs: each as a copy, with what arrives at it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..pipe_ir.inputs import bind_inputs
from ..pipe_ir.pipe import Pipe
from ..pipe_ir.traced import TracedModel
from ..split.cost import Weights


def example_values(
    traced: TracedModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    device: torch.device,
    sizes: Mapping[str, int] | None = None,
) -> dict[int, Any]:
    """The inputs by their index in the trace, on a device; with other sizes of symbolic dims their rows repeat."""
    weigh = Weights(traced, {**traced.hints, **(sizes or {})})
    found = {}
    for index, value in bind_inputs(traced.call, args, kwargs or {}).items():
        spec = traced.steps[index].spec
        if isinstance(value, Tensor):
            shape = value.shape if spec is None else [int(weigh.number(dim)) for dim in spec.shape]
            value = _resized(value, shape).to(device)
        found[index] = value
    return found


def _resized(value: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        if value.shape[dim] != size:
            if value.shape[dim] == 0:
                raise InputError(
                    f"an input of the example has the shape {tuple(value.shape)}: it has nothing that could be "
                    f"repeated to the {size} along dim {dim} that a measured run takes; pass an example with a sample "
                    "at least"
                )
            rows = torch.arange(size, device=value.device) % value.shape[dim]
            value = value.detach().index_select(dim, rows).requires_grad_(value.requires_grad)
    return value


def walk(pipe: Pipe, values: dict[int, Any], device: torch.device) -> Iterator[tuple[int, nn.Module, list[Any]]]:
    """The number of each stage, a copy of it, and its inputs; whoever gets it may run it, and keep it."""
    for info, stage in zip(pipe.stage_infos, pipe.stages, strict=True):
        # A copy: its gradients and running statistics are its own, and it is gone before the next one is made.
        module = copy.deepcopy(stage).to(device)
        inputs = [values[index] for index in info.inputs]
        yield info.index, module, inputs
        if info.index < pipe.num_stages - 1:
            with torch.no_grad():
                made = module(*map(_fresh, inputs))
            values.update(zip(info.outputs, (made,) if len(info.outputs) == 1 else made or (), strict=True))
            _mark_gradients(pipe, info.outputs, values)


def _fresh(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _mark_gradients(pipe: Pipe, indices: Sequence[int], values: dict[int, Any]) -> None:
    for index in indices:
        spec = pipe.traced.steps[index].spec
        if isinstance(values[index], Tensor) and spec is not None and spec.requires_grad:
            values[index] = values[index].detach().requires_grad_()
