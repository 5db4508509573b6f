"""verify() with every stage in memory of its own, as on ranks: two steps with an optimizer, beside the uncut model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import IsolationError, StepError
from ..pipe_ir import Memories, Reads, Space, clone, functions_around, storages_of
from ..run import PlannedSchedule
from ..stage import PipelineStage, is_distributed
from ..text import listed, numbered
from ..torch_internals import has_gradient_hooks, storage_id, tensor_hooks
from .report import (
    Difference,
    Tolerance,
    compare_numbers,
    compare_tensors,
    compare_values,
    largest,
    magnitudes_of,
    module_of,
)
from .runs import SavedState, StepInputs, StepResult, check_finite, run_cut, run_uncut, schedule_of
from .stages import HeldParameter, PlannedStages, match_buffers

_UNCUT = -1  # the owner of the memory in which the uncut model runs
_STEP = 0.01  # the length of the optimizer's step, as a part of that of all weights
_LATER = 10  # how much more the second step may differ: what the first has rounded goes through everything once more
_SHOWN = 4
_COMPUTATIONS = ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")


def obstacle_to_isolation(stages: Sequence[PipelineStage]) -> str:
    """Say why stages cannot be copied into memories of their own; nothing if they can."""
    for stage in stages:
        if stage.replica.groups:
            return f"stage {stage.stage_index} is copied or sharded over ranks"
        for name, parameter in stage.submod.named_parameters():
            if is_distributed(parameter):
                return f"{name} of stage {stage.stage_index} is a DTensor"
            if has_gradient_hooks(parameter) and not tensor_hooks(parameter):
                return f"{name} of stage {stage.stage_index} has a hook for accumulated gradients"
    return ""


@dataclass(frozen=True)
class _IsolatedSteps:
    """Results of the first step, cut and uncut, and all that is known of both: `held` are the stages' own copies."""

    stages: PlannedStages
    held: list[HeldParameter]
    cut: StepResult
    uncut: StepResult
    is_random: bool
    differences: tuple[Difference, ...]  # leaks, the weights after the optimizer's step, and the second step
    suspects: tuple[str, ...]  # what may be the reason if something differs


@dataclass(frozen=True)
class _Later:
    """The uncut model after the optimizer's step: its weights, and its second step, if its loss is a number."""

    rate: float
    weights: Mapping[str, Tensor]
    second: StepResult | None


def run_isolated(
    stages: PlannedStages,
    model: nn.Module,
    inputs: StepInputs,
    options: Mapping[str, Any],
    held: Iterable[HeldParameter],
    tolerance_of: Callable[[StepResult], Tolerance],
    compare: Callable[[PlannedStages, StepResult, StepResult, Sequence[HeldParameter], Tolerance], Any],
) -> tuple[_IsolatedSteps, Any]:
    """Run the uncut model and the stages; `compare` sees the first step, while its gradients are there."""
    apart = _Apart(stages, model, inputs, {id(each.parameter): each.name for each in held})
    state = SavedState([model, *(stage.submod for stage in stages.stages)], weights=True)
    try:
        state.begin()
        apart.memories.switch(_UNCUT)
        uncut = run_uncut(model, inputs.copied(), stages.stages[0].select_output)
        check_finite(uncut)
        is_random = state.drew_random_numbers() and inputs.parts is None
        later = _descend_uncut(model, inputs, uncut, stages.stages[0].select_output)
        apart.memories.switch(None)
        state.begin()
        tolerance = tolerance_of(uncut)
        schedule = apart.schedule(options)
        cut = apart.step(schedule)
        found = compare(apart.stages, cut, uncut, apart.held, tolerance)
        differences = [*apart.leaks(), *apart.descend(uncut, later, tolerance)]
        if later.second is not None:
            differences += _compare_second(apart.step(schedule), later.second, tolerance)
        steps = _IsolatedSteps(
            apart.stages, apart.held, cut, uncut, is_random, tuple(differences), tuple(apart.suspects())
        )
    finally:
        apart.memories.switch(None)
        state.restore()
    return steps, found


def _descend_uncut(
    model: nn.Module, inputs: StepInputs, first: StepResult, select_output: Callable[[Any], Any]
) -> _Later:
    parameters = dict(model.named_parameters())
    norms = [float(torch.linalg.vector_norm(each.detach().float())) for each in parameters.values()]
    slopes = [float(torch.linalg.vector_norm(each.float())) for each in first.gradients.values() if each is not None]
    slope = math.hypot(*slopes)
    rate = _STEP * math.hypot(*norms) / slope if slope and math.isfinite(slope) else 0.0
    _descend(parameters.values(), rate)
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    second = run_uncut(model, inputs.copied(), select_output)
    is_number = second.loss is not None and math.isfinite(second.loss)
    return _Later(rate, weights, second if is_number else None)


@torch.no_grad()
def _descend(parameters: Iterable[Tensor], rate: float) -> None:
    """Take a step of gradient descent, and forget the gradients."""
    for parameter in {id(each): each for each in parameters}.values():
        if parameter.grad is not None:
            parameter -= rate * parameter.grad
            parameter.grad = None


def _compare_second(cut: StepResult, uncut: StepResult, tolerance: Tolerance) -> Iterator[Difference]:
    wider = replace(tolerance, rtol=_LATER * tolerance.rtol)
    if cut.loss is not None and uncut.loss is not None:
        yield compare_numbers("second loss", cut.loss, uncut.loss, wider)
    yield from compare_values("second output", cut.output, uncut.output, wider)


class _Apart:
    """Copies of the stages, each with a memory of its own."""

    def __init__(self, stages: PlannedStages, model: nn.Module, inputs: StepInputs, names: Mapping[int, str]) -> None:
        self._inputs = inputs
        self._model = model
        self._names = {id(tensor): name for name, tensor in _tensors_of(model).items()} | dict(names)
        self._reads: dict[tuple[int, str], dict[str, None]] = {}  # names, by stage and line of the user's code
        self._spaces = {stage.stage_index: Space() for stage in stages.stages}
        self._own = {stage.stage_index: set(map(id, _tensors_of(stage.submod).values())) for stage in stages.stages}
        copies = [self._copied(stage) for stage in stages.stages]
        self.stages = replace(stages, stages=copies)
        self.held = [
            HeldParameter(stage.stage_index, names[id(parameter)], self._spaces[stage.stage_index].tensor(parameter))
            for stage in stages.stages
            for parameter in stage.submod.parameters()
            if id(parameter) in names
        ]
        self._storages = {stage.stage_index: storages_of(stage.submod) for stage in copies}
        self._buffers = match_buffers(stages.stages, model)
        as_it_is = Space()
        for tensor in _tensors_of(model).values():
            as_it_is.share(tensor)
        roots: dict[int, list[Any]] = {stage.stage_index: functions_around(stage.submod) for stage in copies}
        roots[max(roots)].append(inputs.loss_fn)
        parts = [part for stage in copies for part in stage.submod.modules()]
        self.memories = Memories(
            {**roots, _UNCUT: [model, inputs.loss_fn]}, {**self._spaces, _UNCUT: as_it_is}, apart=parts
        )

    def _copied(self, stage: PipelineStage) -> PipelineStage:
        space = self._spaces[stage.stage_index]
        replaced = {id(tensor): space.tensor(tensor) for tensor in _tensors_of(stage.submod).values()}
        module = clone(stage.submod, replaced=replaced)
        done = {id(tensor) for tensor in replaced.values()}
        for part in module.modules():
            for name, value in vars(part).items():
                if isinstance(value, Tensor) and id(value) not in done:  # a plain attribute, which copies share
                    vars(part)[name] = space.tensor(value)
        return stage.with_module(module)

    def schedule(self, options: Mapping[str, Any]) -> PlannedSchedule:
        """Return a schedule of the copies that computes in the memory of each."""
        schedule = schedule_of(self.stages, self._inputs, options)

        def computed(action: Any, context: Any) -> None:
            self.memories.switch(action.stage)
            own = self._storages[action.stage]
            copies = [(storage_id(each), name) for stage, each, name in self._foreign_copies() if stage == action.stage]
            watched = {storage: name for storage, name in copies if storage not in own}

            def found(name: str, line: str) -> None:
                self._reads.setdefault((action.stage, line), {})[name] = None

            with Reads(watched, found) if watched else contextlib.nullcontext():
                context.run(action)

        for op in _COMPUTATIONS:
            schedule.register_custom_function(op, computed)
        return schedule

    def step(self, schedule: PlannedSchedule) -> StepResult:
        """Run a step of the copies."""
        try:
            result = run_cut(schedule, self.stages, self._inputs.copied(), self._buffers)
        except StepError as error:
            self.memories.switch(None)
            suspects = list(self.suspects())
            if not suspects:
                raise
            raise IsolationError(
                f"with every stage in memory of its own, as on separate ranks, {error}\n"
                + "".join(f"{suspect}\n" for suspect in suspects)
                + "verify(..., isolated=False) runs all stages in one memory, as one process does"
            ) from error
        self.memories.switch(None)
        return result

    def descend(self, first: StepResult, later: _Later, tolerance: Tolerance) -> Iterator[Difference]:
        """Take the optimizer's step in every stage, and compare the weights."""
        gradients = magnitudes_of(first.gradients)
        for stage in self.stages.stages:
            _descend(stage.submod.parameters(), later.rate)
        for held in self.held:
            weight = later.weights[held.name]
            # What rounding did to a gradient is measured by the gradients beside it.
            measure = largest(weight) + later.rate * gradients.get(module_of(held.name), 0.0)
            yield compare_tensors("weight", held.name, held.parameter, weight, tolerance, measure, held.stage)

    def leaks(self) -> Iterator[Difference]:
        """Yield the model's tensors that got a gradient, or were written to, in a stage that does not hold them."""
        for stage, original, name in self._foreign():
            space = self._spaces[stage]
            got = "gets a gradient" if space.tensors[id(original)].grad is not None else "is written to"
            if space.is_changed(original) or space.tensors[id(original)].grad is not None:
                fault = f"{got} in stage {stage}, which does not reach {self._holders(original)}"
                yield Difference("leak", name, stage=stage, fault=fault)
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                yield Difference(
                    "leak", name, fault=f"gets a gradient past the copy that {self._holders(parameter)} has"
                )

    def suspects(self) -> Iterator[str]:
        """Yield what stages can reach of others, in words."""
        holders = {name: self._holders(original) for _, original, name in self._foreign()}
        for (stage, line), names in self._reads.items():
            used = [f"{name} (of {holders[name]})" for name in names]
            yield (
                f"stage {stage} uses {listed(used, _SHOWN)} at {line}: on separate ranks these are not updated there, "
                "and their gradients are lost. A loss of parameters is added by schedule.add_loss(); anything else has "
                "to go through the forward of the model"
            )
        for shared in self.memories.shared_and_changed(sorted(self._spaces)):
            yield (
                f"{shared} in this process, and they change it: on separate ranks each has its own. Hand values over "
                "as tensors, in arguments and results, or cut so that all its users are in one stage"
            )

    def _foreign(self) -> Iterator[tuple[int, Tensor, str]]:
        for stage, space in self._spaces.items():
            for original in space.originals:
                if id(original) in self._names and id(original) not in self._own[stage]:
                    yield stage, original, self._names[id(original)]

    def _foreign_copies(self) -> Iterator[tuple[int, Tensor, str]]:
        for stage, original, name in self._foreign():
            yield stage, self._spaces[stage].tensors[id(original)], name

    def _holders(self, original: Tensor) -> str:
        holders = [stage for stage, own in self._own.items() if id(original) in own]
        return numbered("stage", holders) if holders else "any stage"


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
