"""The differences that one process finds, together with those of the other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..run import digest, exchange
from .compare import Tolerance, compare_gradients, compare_numbers, compare_tensors, compare_values, largest, plain
from .report import MISSING, Difference
from .runs import Gradients, StepInputs, StepResult
from .stages import HeldParameter, PlannedStages

_T = TypeVar("_T")
_FAULT = "fault"


@dataclass(frozen=True)
class RankDifferences:
    """Differences that one process found; the norms of its stages' gradients, and the names of their parameters."""

    differences: tuple[Difference, ...]
    norms: Mapping[str, float]
    held: frozenset[str]


def compare_steps(
    stages: PlannedStages, cut: StepResult, uncut: StepResult, parameters: Sequence[HeldParameter], tolerance: Tolerance
) -> RankDifferences:
    """Compare all results that this process has. Buffers that every microbatch updates are not compared."""
    differences: list[Difference] = []
    if stages.has_output:
        if cut.loss is not None and uncut.loss is not None:
            differences.append(compare_numbers("loss", cut.loss, uncut.loss, tolerance))
        differences += compare_values("output", cut.output, uncut.output, tolerance)
    differences += _gradient_differences(parameters, uncut, tolerance)
    if stages.has_input:
        for name, gradient in uncut.input_gradients.items():
            ours = cut.input_gradients[name]
            differences += compare_gradients(name, ours, gradient, tolerance, 0.0, None, "input gradient")
    differences += [
        compare_tensors("buffer", name, buffer, uncut.buffers[name], tolerance)
        for name, buffer in cut.buffers.items()
        if stages.plan.microbatches == 1 or name not in uncut.updated
    ]
    norms = {held.name: _norm(held.parameter.grad) for held in parameters if held.parameter.grad is not None}
    return RankDifferences(tuple(differences), norms, frozenset(held.name for held in parameters))


def _gradient_differences(
    parameters: Sequence[HeldParameter], uncut: StepResult, tolerance: Tolerance
) -> Iterator[Difference]:
    measures = _magnitudes(uncut.gradients)
    for held in parameters:
        magnitude = measures.get(_module_of(held.name), 0.0)
        gradient = uncut.gradients[held.name]
        yield from compare_gradients(held.name, held.parameter.grad, gradient, tolerance, magnitude, held.stage)


def _magnitudes(gradients: Gradients) -> dict[str, float]:
    """Return the largest element of the gradients of each module's own parameters.

    Some gradients are zero in exact arithmetic (the bias of attention's keys, a bias in front of a normalisation): the
    computed ones are the rounding of numbers as large as the gradients beside them.
    """
    found: dict[str, float] = {}
    for name, gradient in gradients.items():
        if gradient is not None:
            module = _module_of(name)
            found[module] = max(found.get(module, 0.0), largest(gradient))
    return found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def gather(own: RankDifferences, stages: PlannedStages) -> list[RankDifferences]:
    """Return the differences of all ranks, on all of them."""
    if not stages.is_distributed:
        return [own]
    collected: list[RankDifferences | None] = [None] * dist.get_world_size(stages.group)
    dist.all_gather_object(collected, own, group=stages.group)
    return [each for each in collected if each is not None]


def all_differences(ranks: Sequence[RankDifferences], uncut: StepResult, tolerance: Tolerance) -> list[Difference]:
    """Return all differences, with those of all stages together: the norm, and parameters that no stage holds."""
    norms: dict[str, float] = {}
    for rank in ranks:
        norms = {**rank.norms, **norms}  # a tied parameter counts once
    held = frozenset[str]().union(*(rank.held for rank in ranks))
    found = [difference for rank in ranks for difference in rank.differences]
    found += [
        Difference("gradient", name, fault=MISSING)
        for name, gradient in uncut.gradients.items()
        if gradient is not None and name not in held
    ]
    if uncut.loss is not None:
        whole = [_norm(gradient) for gradient in uncut.gradients.values() if gradient is not None]
        found.insert(0, compare_numbers("gradient norm", math.hypot(*norms.values()), math.hypot(*whole), tolerance))
    return found


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(plain(gradient)))


def prepare_on_all_ranks(stages: PlannedStages, model: nn.Module, inputs: StepInputs, prepare: Callable[[], _T]) -> _T:
    """Return what `prepare` returns, once all ranks have the same model and batch and none of them fails in it."""
    if not stages.is_distributed:
        return prepare()
    prepared: list[_T] = []
    fault = ""
    try:
        prepared.append(prepare())
    except InputError as error:
        fault = str(error)
    values = {"parameters of the model": list(model.parameters()), "arguments": inputs.call, "target": inputs.target}
    facts = {name: digest(value) for name, value in values.items()}
    ranks = exchange({**facts, _FAULT: fault}, stages.group)
    for rank, known in enumerate(ranks):
        if known[_FAULT]:
            raise InputError(f"on rank {rank}, {known[_FAULT]}")
    for rank, known in enumerate(ranks):
        differing = [name for name in facts if known[name] != ranks[0][name]]
        if differing:
            raise InputError(
                f"the {' and '.join(differing)} on rank {rank} are not those on rank 0, and every rank compares with "
                "the uncut model: make them in the same way on all ranks, after the same torch.manual_seed()"
            )
    return prepared[0]
