"""The wrappers in a stage's module, by the table of all that a pipeline can steer, and the process groups that it uses.

In these groups the module computes together with other ranks, and may wait for them. A rank whose step fails closes the
connections of all of them, so that no other waits there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import InputError
from ...torch_internals import wrapped_attribute
from ..dtensor import is_distributed
from .base import NotReplicated, Replica, Wrapper, WrapperClass
from .ddp import COPIES
from .fsdp import SHARDS

# A new wrapper is a file with its Replica, and an entry here.
_WRAPPERS = (COPIES, SHARDS)

# Wrappers that would average some gradients and not others, since the last backward cannot be marked for them, and
# what to use instead.
_UNSUPPORTED = (
    (
        WrapperClass("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel (FSDP1)"),
        "fully_shard",
    ),
)


def replica_of(module: nn.Module) -> Replica:
    """Return the replica of a stage's module, wrapped as a whole or in parts.

    >>> replica_of(nn.Linear(2, 2)).is_reduced
    False
    """
    _check_supported(module)
    found = []
    for wrapper in _WRAPPERS:
        parts = _parts_under(wrapper, module)
        if parts:
            found.append((wrapper, parts))
    if not found:
        return NotReplicated()
    if len(found) > 1:
        names = [next(iter(parts.values())) for _, parts in found]
        raise InputError(f"a stage holds both {' and '.join(names)} modules: use one of the two for all its parts")
    ((wrapper, parts),) = found
    return wrapper.replica(module, list(parts))


def wrapped_parts(module: nn.Module) -> frozenset[int]:
    """Return the ids of the parts of a module that are copied or sharded."""
    return frozenset(id(part) for wrapper in _WRAPPERS for part in _parts_under(wrapper, module))


class UnwrappedNames:
    """Names that the tensors of a module have without torch's wrappers, wherever in the module these are.

    >>> import torch
    >>> layers = nn.Sequential(nn.Linear(1, 1), torch.compile(nn.Linear(1, 1)))
    >>> names = UnwrappedNames(layers)
    >>> [names.of(name) for name, _ in layers.named_parameters()]
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths: dict[str, str] = {}  # of modules inside wrappers, without these
        inside: dict[str, str] = {}  # the paths of what wrappers hold, and where the wrappers are
        for path, part in module.named_modules(remove_duplicate=False):
            attribute = wrapped_attribute(part)
            if attribute is not None:
                inside[f"{path}.{attribute}".lstrip(".")] = path
            parent, _, name = path.rpartition(".")
            if path in inside:
                self._paths[path] = self._paths.get(inside[path], inside[path])
            elif parent in self._paths:
                self._paths[path] = f"{self._paths[parent]}.{name}".lstrip(".")

    def of(self, name: str) -> str:
        """Return a parameter's or a buffer's name, or a key of the module's state_dict, without wrappers."""
        path, rest = name, ""
        while self._paths and path:
            path, _, last = path.rpartition(".")
            rest = f"{last}.{rest}".rstrip(".")
            if path in self._paths:
                return f"{self._paths[path]}.{rest}".lstrip(".")
        return name


def _check_supported(module: nn.Module) -> None:
    for known, instead in _UNSUPPORTED:
        kind = _imported(known)
        for path, part in module.named_modules():
            if kind is not None and isinstance(part, kind):
                where = f"'{path}' of a stage" if path else "a stage"
                raise InputError(
                    f"{where} is under {known.called}, which a pipeline cannot steer: use {instead} instead"
                )


def _parts_under(wrapper: Wrapper, module: nn.Module) -> dict[nn.Module, str]:
    """Return the parts of a module that are wrapped in this way, each with the name of its wrapper."""
    found: dict[nn.Module, str] = {}
    kinds = [(kind, known.called) for known in wrapper.classes if (kind := _imported(known)) is not None]
    for part in module.modules() if kinds else ():
        for kind, called in kinds:
            if isinstance(part, kind):
                found.setdefault(part, called)
    return found


def _imported(known: WrapperClass) -> type | None:
    """Return the class, which may be slow to import; None while nobody has imported it."""
    return getattr(sys.modules.get(known.module), known.name, None)


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
