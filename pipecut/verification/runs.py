"""One training step of the uncut model, and one of the stages, on copies of the same arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..errors import InputError
from ..pipe_ir import PipeInfo, UnsentValue, flatten, map_leaves, unflatten
from ..run import PlannedSchedule, cut_traced
from ..stage import merge_chunks, random_streams
from ..text import listed, shape_text
from .stages import BufferPlace, Call, PlannedStages

_Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class InMicrobatches:
    """The way in which the uncut model draws the random numbers that its stages draw: its forward runs in microbatches.

    The loss is that of the whole batch, and there is one backward.
    """

    info: PipeInfo
    microbatches: int
    specs: tuple[Any, Any]
    merge_spec: Any

    def output(self, model: nn.Module, call: Call, select_output: Callable[[Any], Any]) -> Any:
        """Return the merged output of a call."""
        calls = cut_traced(self.info.call, *call, self.microbatches, self.specs, fewer=True)
        streams = random_streams(len(calls.samples), next((each.device for each in model.parameters()), "cpu"))
        outputs = []
        for args, kwargs, stream in zip(calls.args, calls.kwargs, streams, strict=True):
            with stream:
                outputs.append(select_output(model(*args, **kwargs)))
        if len(outputs) == 1:
            return outputs[0]
        rows = [set(sizes) for sizes in calls.sizes]
        return merge_chunks(outputs, self.merge_spec, calls.samples, rows=rows, in_order=calls.made.in_order)


@dataclass(frozen=True)
class StepInputs:
    """Inputs of the step: a call of the model and, with a loss, a backward pass."""

    call: Call
    target: Any
    loss_fn: Callable[..., Tensor] | None
    loss_kwargs: Mapping[str, Any]
    parts: InMicrobatches | None = None  # None: the uncut model runs on the whole batch

    def copied(self) -> StepInputs:
        """Return the same inputs with copies of their tensors, which a run may write to."""
        copies: dict[int, Tensor] = {}

        def copy_of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        args, kwargs, target = map_leaves(copy_of, (tuple(self.call[0]), dict(self.call[1]), self.target))
        return replace(self, call=(args, kwargs), target=target)

    def input_gradients(self) -> _Gradients:
        """Return the gradients of the arguments that require one, after a run."""
        leaves, structure = flatten({"args": self.call[0], **self.call[1]})
        paths = ["".join((path[0][2:-2], *path[1:])) for path in structure.paths()]
        return {
            path: leaf.grad
            for path, leaf in zip(paths, leaves, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        }


@dataclass(frozen=True)
class StepResult:
    """Results of a step: `buffers` are those after it, of which the step has changed `updated`."""

    output: Any
    loss: float | None
    input_gradients: _Gradients
    buffers: dict[str, Tensor]
    gradients: _Gradients = field(default_factory=dict)
    updated: tuple[str, ...] = ()
    left_out: str = ""  # outputs that it does not have, in words


def run_uncut(model: nn.Module, inputs: StepInputs, select_output: Callable[[Any], Any]) -> StepResult:
    """Run one step of the model.

    `select_output` returns the part of the model's result that the last stage returns.
    """
    before = _buffers_of(model)
    args, kwargs = inputs.call
    with torch.set_grad_enabled(inputs.loss_fn is not None):
        if inputs.parts is None:
            output = select_output(model(*args, **kwargs))
        else:
            output = inputs.parts.output(model, inputs.call, select_output)
        loss = None if inputs.loss_fn is None else _loss(inputs, output)
    if loss is not None and loss.requires_grad:
        torch.autograd.backward([loss])
    after = _buffers_of(model)
    return StepResult(
        map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output, holders=True),
        None if loss is None else float(loss.detach()),
        inputs.input_gradients(),
        after,
        gradients={name: parameter.grad for name, parameter in model.named_parameters()},
        updated=tuple(name for name, buffer in before.items() if not torch.equal(buffer, after[name])),
    )


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def _loss(inputs: StepInputs, output: Any) -> Tensor:
    assert inputs.loss_fn is not None
    loss = inputs.loss_fn(output, inputs.target, **inputs.loss_kwargs)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        kind = f"a tensor of shape {shape_text(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"loss_fn returned {kind} for the uncut model; it must return one number, a tensor without dims"
        )
    return loss


def check_finite(uncut: StepResult) -> None:
    """Raise if the loss of the uncut model is not a number."""
    if uncut.loss is not None and not math.isfinite(uncut.loss):
        raise InputError(f"the loss of the uncut model is {uncut.loss}: there is nothing to compare with")


def schedule_of(stages: PlannedStages, inputs: StepInputs, options: Mapping[str, Any]) -> PlannedSchedule:
    """Return the schedule that runs the stages."""
    # In one process, with one microbatch, the stages of modules cut by hand then draw what the uncut model draws.
    options = {"random_numbers": "per_process" if inputs.parts is None else "as_uncut", **options}
    return PlannedSchedule(stages.stages, stages.plan, inputs.loss_fn, **options)


def run_cut(
    schedule: PlannedSchedule, stages: PlannedStages, inputs: StepInputs, buffers: Mapping[BufferPlace, str]
) -> StepResult:
    """Run one step of the stages by the plan, with the other ranks. The gradients are in their parameters."""
    args, kwargs = inputs.call
    modules = {stage.stage_index: stage.submod for stage in stages.stages}
    info, left_out = stages.stages[0].pipe_info, ""
    unsent = info.unsent if inputs.loss_fn is not None and info is not None else ()
    before = _saved_buffers(modules.values() if unsent else ())
    if inputs.loss_fn is None:
        output, loss = schedule.eval(*args, **kwargs), None
    else:
        output = schedule.step(*args, target=inputs.target, loss_kwargs=inputs.loss_kwargs, **kwargs)
        loss = schedule.mean_loss()
    held = {name: modules[stage].get_buffer(path).clone() for (stage, path), name in buffers.items()}
    if unsent:
        if inputs.parts is None:
            after = _saved_buffers(modules.values())
            _put_back(before)  # the same run once more
            output = _filled_up(output, schedule.eval(*args, **kwargs))
            _put_back(after)
        else:
            names = listed((each.name for each in unsent), 3)
            left_out = (
                f"{names} are not compared: training steps do not send them, and another run draws other random "
                "numbers. Without a loss_fn, or in eval mode, they are"
            )
    return StepResult(output, loss, inputs.input_gradients(), held, left_out=left_out)


def _filled_up(output: Any, whole: Any) -> Any:
    """Return an output in which what was not sent is as in another one, which has all; None on other ranks."""
    leaves, structure = flatten(output, holders=True)
    others, _ = flatten(whole, holders=True)
    pairs = zip(leaves, others, strict=True)
    return unflatten(structure, [other if type(leaf) is UnsentValue else leaf for leaf, other in pairs])


_Buffers = list[tuple[nn.Module, str, Tensor, Tensor]]  # module, name, buffer, and its value


def _saved_buffers(modules: Iterable[nn.Module]) -> _Buffers:
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    return [(part, name, each, each.clone()) for part in parts for name, each in part.named_buffers(recurse=False)]


@torch.no_grad()
def _put_back(buffers: _Buffers) -> None:
    for part, name, buffer, value in buffers:
        setattr(part, name, buffer.copy_(value))


class SavedState:
    """_Gradients, buffers and random numbers of some modules, to reset before each run and to restore afterwards.

    With `weights`, the values of parameters too.
    """

    def __init__(self, modules: Iterable[nn.Module], *, weights: bool = False) -> None:
        parts = list({id(part): part for module in modules for part in module.modules()}.values())
        parameters = [parameter for part in parts for parameter in part.parameters(recurse=False)]
        self._gradients = {id(parameter): (parameter, parameter.grad) for parameter in parameters}
        self._weights = [
            (parameter, parameter.detach().clone()) for parameter, _ in self._gradients.values() if weights
        ]
        self._buffers = _saved_buffers(parts)
        tensors = [*parameters, *(buffer for _, _, buffer, _ in self._buffers)]
        self._devices = sorted(
            {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str
        )
        self._random = self._random_states()
        self._python_random, self._numpy_random = random.getstate(), numpy.random.get_state()

    def begin(self) -> None:
        """Start a run: no gradients, everything else as saved."""
        for parameter, _ in self._gradients.values():
            parameter.grad = None
        self._reset()

    def restore(self) -> None:
        """Restore everything."""
        for parameter, gradient in self._gradients.values():
            parameter.grad = gradient
        self._reset()

    def drew_random_numbers(self) -> bool:
        """Return True if a run has, since it began."""
        return any(not torch.equal(*states) for states in zip(self._random, self._random_states(), strict=True))

    @torch.no_grad()
    def _reset(self) -> None:
        for parameter, value in self._weights:
            if not torch.equal(parameter, value):
                parameter.copy_(value)
        _put_back(self._buffers)
        random.setstate(self._python_random)
        numpy.random.set_state(self._numpy_random)
        torch.set_rng_state(self._random[0])
        for device, state in zip(self._devices, self._random[1:], strict=True):
            _generators_of(device).set_rng_state(state, device)

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(_generators_of(device).get_rng_state(device) for device in self._devices)]


def _generators_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
