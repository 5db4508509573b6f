"""Process groups in which a stage's module computes together with other ranks, and may wait for them.

A rank whose step fails closes the connections of all of them, so that no other waits there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from .dtensor import is_distributed
from .replica import Replica


class _StageGroups(NamedTuple):
    """The groups of a stage, besides that of its pipeline; none of them has one rank only."""

    replicas: tuple[dist.ProcessGroup, ...] = ()  # of copies and shards by DistributedDataParallel or fully_shard
    tensors: tuple[dist.ProcessGroup, ...] = ()  # of the meshes that parameters and buffers lie on, if not above
    used: tuple[dist.ProcessGroup, ...] = ()  # attributes of its modules, for collectives of their own

    @property
    def partners(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks hold parts or copies of the same stage, and run the same steps."""
        return self.replicas + self.tensors


def groups_of(module: nn.Module, replica: Replica) -> _StageGroups:
    """Return the groups in which a module computes.

    >>> groups_of(nn.Linear(2, 2), Replica())
    _StageGroups(replicas=(), tensors=(), used=())
    """
    seen: set[str] = set()
    replicas = tuple(_new(replica.groups, seen))
    tensors = tuple(_new(_groups_of_tensors(module), seen))
    return _StageGroups(replicas, tensors, tuple(_new(_groups_of_attributes(module), seen)))


def check_not_within_pipeline(groups: _StageGroups, stage: int, pipeline: dist.ProcessGroup | None) -> None:
    """Raise if a stage is copied or sharded over ranks of its own pipeline, which hold other stages."""
    own = set(dist.get_process_group_ranks(pipeline)) - {dist.get_rank()}
    for found, how, remedy in (
        (groups.replicas, "copied or sharded", _DATA_PARALLEL),
        (groups.tensors, "made parallel", _TENSOR_PARALLEL),
    ):
        for group in found:
            ranks = dist.get_process_group_ranks(group)
            if not own.isdisjoint(ranks):
                raise InputError(
                    f"stage {stage} is {how} over ranks {ranks}, of which {sorted(own & set(ranks))} hold other "
                    f"stages of the same pipeline. {remedy}"
                )


_DATA_PARALLEL = (
    "Give DistributedDataParallel the process_group, and fully_shard the mesh, of the data-parallel ranks: for "
    'mesh_dim_names=("dp", "pp") those of mesh["dp"]'
)
_TENSOR_PARALLEL = (
    "Give parallelize_module and distribute_tensor the mesh of the tensor-parallel ranks: for "
    'mesh_dim_names=("pp", "tp") it is mesh["tp"]'
)


def _new(groups: Iterable[dist.ProcessGroup], seen: set[str]) -> Iterator[dist.ProcessGroup]:
    """Yield those that were not seen before; in one of a single rank nobody waits."""
    for group in groups:
        if group.size() > 1 and group.group_name not in seen:
            seen.add(group.group_name)
            yield group


def _groups_of_tensors(module: nn.Module) -> Iterator[dist.ProcessGroup]:
    tensors = filter(is_distributed, chain(module.parameters(), module.buffers()))
    for mesh in {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors}.values():
        yield from _groups_of_mesh(mesh)


def _groups_of_attributes(module: nn.Module) -> Iterator[dist.ProcessGroup]:
    for value in chain.from_iterable(vars(part).values() for part in module.modules()):
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif _is_own_mesh(value):
            yield from _groups_of_mesh(value)


def _groups_of_mesh(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of a mesh, which it knows by name; raise if the names are of groups that were destroyed."""
    place = tuple(mesh.get_coordinate() or ())
    lines = [mesh.mesh[(*place[:dim], slice(None), *place[dim + 1 :])] for dim in range(mesh.ndim)]  # type: ignore[index]
    along = [sorted(line.tolist()) for line in lines]
    with contextlib.suppress(RuntimeError):  # there is none of this name
        groups = mesh.get_all_groups()
        if [sorted(dist.get_process_group_ranks(group)) for group in groups] == along:
            return groups
    raise InputError(
        f"a stage has tensors on {mesh}, whose process groups were destroyed. torch keeps such meshes for DTensors on "
        "new ones that are alike: make the new mesh by pipecut.device_mesh(), which lets torch forget them, or start "
        "the processes again"
    )


def _is_own_mesh(value: Any) -> bool:
    """Return True for a DeviceMesh that this rank is in."""
    return isinstance(value, DeviceMesh) and value.get_coordinate() is not None
