"""The ways in which a stage can have copies."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def alone(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """No copies."""
    return module


def copied(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """DistributedDataParallel around the stage."""
    return DistributedDataParallel(module, process_group=mesh.get_group(), **options)


def replicated(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The older replicate(), which is DistributedDataParallel out of sight."""
    from torch.distributed._composable.replicate import replicate

    return replicate(module, process_group=mesh.get_group(), **options)


def sharded(module: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """fully_shard on the blocks of the stage, and on the rest of it."""
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def sharded_as_one(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """fully_shard on the stage only."""
    return fully_shard(module, mesh=mesh, **options)
