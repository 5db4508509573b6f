"""Before ranks verify together: they have the same model and the same batch, and each of them knows its stages."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..pipe_ir.structure import flatten
from .compare import plain
from .runs import Task
from .subject import Subject

T = TypeVar("T")


@dataclass(frozen=True)
class _Standing:
    """What one rank has: numbers that stand for tensors, and what is wrong with its stages."""

    digests: dict[str, int]
    fault: str


def agreed(subject: Subject, model: nn.Module, task: Task, prepare: Callable[[], T]) -> T:
    """What `prepare` gives, once all ranks have the same and none of them fails in it."""
    if not subject.is_distributed:
        return prepare()
    prepared: list[T] = []
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
