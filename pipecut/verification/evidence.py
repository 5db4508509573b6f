"""The differences that one process sees, put together with those of the other ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..pipe_ir import flatten
from .compare import Tolerance, compare_gradients, compare_numbers, compare_tensors, compare_values, largest, plain
from .report import MISSING, Difference
from .runs import Gradients, Run, Task
from .subject import Holding, Subject


@dataclass(frozen=True)
class _Evidence:
    """What one process found. `norms` are those of the gradients that its stages have, by parameter."""

    differences: tuple[Difference, ...]
    norms: Mapping[str, float]
    held: frozenset[str]


def evidence_of(subject: Subject, cut: Run, uncut: Run, holdings: Sequence[Holding], tolerance: Tolerance) -> _Evidence:
    """Compare everything that this process has a part of. Buffers that every microbatch updates are not compared."""
    differences: list[Difference] = []
    if subject.has_output:
        if cut.loss is not None and uncut.loss is not None:
            differences.append(compare_numbers("loss", cut.loss, uncut.loss, tolerance))
        differences += compare_values("output", cut.output, uncut.output, tolerance)
    differences += _gradient_differences(holdings, uncut, tolerance)
    if subject.has_input:
        for name, gradient in uncut.input_gradients.items():
            ours = cut.input_gradients[name]
            differences += compare_gradients(name, ours, gradient, tolerance, 0.0, None, "input gradient")
    differences += [
        compare_tensors("buffer", name, buffer, uncut.buffers[name], tolerance)
        for name, buffer in cut.buffers.items()
        if subject.plan.microbatches == 1 or name not in uncut.updated
    ]
    norms = {holding.name: _norm(holding.parameter.grad) for holding in holdings if holding.parameter.grad is not None}
    return _Evidence(tuple(differences), norms, frozenset(holding.name for holding in holdings))


def _gradient_differences(holdings: Sequence[Holding], uncut: Run, tolerance: Tolerance) -> Iterator[Difference]:
    measures = _magnitudes(uncut.gradients)
    for holding in holdings:
        magnitude = measures.get(_module_of(holding.name), 0.0)
        gradient = uncut.gradients[holding.name]
        yield from compare_gradients(
            holding.name, holding.parameter.grad, gradient, tolerance, magnitude, holding.stage
        )


def _magnitudes(gradients: Gradients) -> dict[str, float]:
    """The largest element of the gradients of each module's own parameters.

    The gradient of some is zero in exact arithmetic (the bias of attention's keys, one in front of a normalisation):
    what is left of it is the rounding of numbers as large as the gradients beside it.
    """
    found: dict[str, float] = {}
    for name, gradient in gradients.items():
        if gradient is not None:
            module = _module_of(name)
            found[module] = max(found.get(module, 0.0), largest(gradient))
    return found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def gathered(evidence: _Evidence, subject: Subject) -> list[_Evidence]:
    """The evidence of all ranks, on all of them."""
    if not subject.is_distributed:
        return [evidence]
    collected: list[_Evidence | None] = [None] * dist.get_world_size(subject.group)
    dist.all_gather_object(collected, evidence, group=subject.group)
    return [each for each in collected if each is not None]


def conclusions(pieces: Sequence[_Evidence], uncut: Run, tolerance: Tolerance) -> list[Difference]:
    """All differences, with what can be said only of all stages together: the norm, and what nobody holds."""
    norms: dict[str, float] = {}
    for piece in pieces:
        norms = {**piece.norms, **norms}  # a tied parameter counts once
    held = frozenset[str]().union(*(piece.held for piece in pieces))
    found = [difference for piece in pieces for difference in piece.differences]
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


# MERGED: Before ranks verify together: they have the same model and the same batch, and each of them knows its
# MERGED: stages.


_T = TypeVar("_T")


@dataclass(frozen=True)
class _Standing:
    """What one rank has: numbers that stand for tensors, and what is wrong with its stages."""

    digests: dict[str, int]
    fault: str


def agreed(subject: Subject, model: nn.Module, task: Task, prepare: Callable[[], _T]) -> _T:
    """What `prepare` gives, once all ranks have the same and none of them fails in it."""
    if not subject.is_distributed:
        return prepare()
    prepared: list[_T] = []
    fault = ""
    try:
        prepared.append(prepare())
    except InputError as error:
        fault = str(error)
    digests = {"parameters of the model": list(model.parameters()), "arguments": task.call, "target": task.target}
    standing = _Standing({name: _digest(value) for name, value in digests.items()}, fault)
    ranks: list[Any] = [None] * dist.get_world_size(subject.group)
    dist.all_gather_object(ranks, standing, group=subject.group)
    _refuse_faults(ranks)
    _refuse_differences(ranks)
    return prepared[0]


def _refuse_faults(ranks: list[_Standing]) -> None:
    for rank, standing in enumerate(ranks):
        if standing.fault:
            raise InputError(f"on rank {rank}, {standing.fault}")


def _refuse_differences(ranks: list[_Standing]) -> None:
    for rank, standing in enumerate(ranks):
        differing = [name for name, digest in standing.digests.items() if digest != ranks[0].digests[name]]
        if differing:
            raise InputError(
                f"the {' and '.join(differing)} on rank {rank} are not those on rank 0, and every rank compares with "
                "the uncut model: make them in the same way on all ranks, after the same torch.manual_seed()"
            )


def _digest(value: Any) -> int:
    leaves, _ = flatten(value)
    return zlib.crc32(repr([_brief(leaf) for leaf in leaves]).encode())


def _brief(leaf: Any) -> object:
    """A tensor as two sums, which another tensor hardly has both of."""
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    numbers = plain(leaf).reshape(-1)
    numbers = numbers if numbers.is_floating_point() else numbers.float()
    return tuple(leaf.shape), str(leaf.dtype), float(numbers.sum()), float(numbers.square().sum())
