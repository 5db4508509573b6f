"""Stages that have copies on other ranks, by any of torch's wrappers, or none: all behind one protocol.

The wrappers are made for one backward a step, and average gradients while it runs. A stage has many, whole or in two
parts, and other stages wait for what each sends back. So the gradients of a step are added up where they are, and
averaged once, after the last of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import InputError
from .replicated import Copied, Replicated, Wrapped

Context = contextlib.AbstractContextManager[None]
_NOTHING = contextlib.nullcontext()


class Replica(Protocol):
    """What has to happen around the computations of a module that other ranks hold too, as copies or in shards."""

    @property
    def is_sharded(self) -> bool:
        """Whether a plan should say when the parameters are gathered."""

    @property
    def is_reduced(self) -> bool:
        """Whether gradients have to be averaged over other ranks after the last backward of a step."""

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """The process groups over which it is copied or sharded."""

    def forward(self) -> Context:
        """Around a forward of the module."""

    def backward(self) -> Context:
        """Around a backward from the module's outputs, whole or for its inputs only."""

    def weight_backward(self) -> Context:
        """Around the rest of a backward, that for the weights."""

    def unshard(self) -> None:
        """Begin to gather the parameters; whoever needs them waits."""

    def reshard(self) -> None:
        """Let go of what was gathered."""

    def reduce_gradients(self) -> None:
        """Average the gradients over the copies, after the last backward of a step."""


class Alone:
    """A module that nobody else holds."""

    is_sharded = False
    is_reduced = False
    groups: Sequence[dist.ProcessGroup] = ()

    def forward(self) -> Context:
        return _NOTHING

    def backward(self) -> Context:
        return _NOTHING

    def weight_backward(self) -> Context:
        return _NOTHING

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce_gradients(self) -> None: ...


def replica_of(module: nn.Module) -> Replica:
    """How a module is held, by itself or in its parts.

    >>> replica_of(nn.Linear(2, 2)).is_reduced
    False
    """
    copies = [copied for part in module.modules() for copied in _copied(part)]
    shards = list(_sharded_parts(module))
    _refuse_unknown(module)
    if copies and shards:
        raise InputError(
            f"a stage holds both {copies[0].called} and fully_shard modules: use one of the two for all its parts"
        )
    if copies:
        from .copies import Copies

        return Copies(copies)
    if shards:
        from .shards import Shards

        return Shards(module, shards)
    return Alone()


def wrappers_in(module: nn.Module) -> frozenset[int]:
    """The parts of a module that are copied or sharded, by identity."""
    kinds: list[Any] = [DistributedDataParallel]
    for source, name in (("torch.distributed._composable.replicate", "DDP"), ("torch.distributed.fsdp", "FSDPModule")):
        kinds.append(getattr(sys.modules.get(source), name, ()))
    wrappers = tuple(kinds)
    return frozenset([id(part) for part in module.modules() if isinstance(part, wrappers)])


def refuse_ranks_of_pipeline(replica: Replica, stage: int, pipeline: dist.ProcessGroup | None) -> None:
    """Copies of a stage are in other pipelines. Within its own, each rank has other stages, which must not be mixed."""
    own = set(dist.get_process_group_ranks(pipeline)) - {dist.get_rank()}
    for group in replica.groups:
        ranks = dist.get_process_group_ranks(group)
        if not own.isdisjoint(ranks):
            raise InputError(
                f"stage {stage} is copied or sharded over ranks {ranks}, of which {sorted(own & set(ranks))} hold "
                "other stages of the same pipeline. Give DistributedDataParallel the process_group, and fully_shard "
                'the mesh, of the data-parallel ranks: for mesh_dim_names=("dp", "pp") those of mesh["dp"]'
            )


def _copied(part: nn.Module) -> Iterator[Copied]:
    """What averages the gradients of a part, if it has copies."""
    kind: type | None = getattr(sys.modules.get("torch.distributed._composable.replicate"), "DDP", None)
    if isinstance(part, DistributedDataParallel):
        yield Wrapped(part)
    elif kind is not None and isinstance(part, kind):
        yield Replicated(part)


def _sharded_parts(module: nn.Module) -> Iterator[nn.Module]:
    # The module of fully_shard is slow to import; while it is not there, nothing is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules() if fsdp is not None else ():
        if isinstance(part, fsdp.FSDPModule):  # type: ignore[union-attr]
            yield part


# Wrappers that would average some gradients and not others, for they cannot be told which backward is the last.
_UNKNOWN = (("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel (FSDP1)", "fully_shard"),)


def _refuse_unknown(module: nn.Module) -> None:
    for source, name, called, instead in _UNKNOWN:
        kind: type | None = getattr(sys.modules.get(source), name, None)
        for path, part in module.named_modules():
            if kind is not None and isinstance(part, kind):
                where = f"'{path}' of a stage" if path else "a stage"
                raise InputError(f"{where} is under {called}, which a pipeline cannot steer: use {instead} instead")
