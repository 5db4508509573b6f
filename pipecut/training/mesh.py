"""Meshes of ranks: which rank holds which stages, which part of the batch, and which part of the layers."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..errors import DisagreementError, InputError, warn
from ..run import differences, exchange
from ..schedule import plan_for
from ..text import counted, did_you_mean, listed
from ..torch_internals import forget_meshes

# The dims of a mesh in their order, the outermost first, and what the ranks along them hold.
_DIMS = {
    "pp": "the stages of one pipeline",
    "dp": "copies of the same stages, for parts of the batch",
    "fsdp": "shards of the same stages, for parts of the batch",
    "tp": "parts of the same layers",
}
_REST = -1
_SHOWN = 64  # ranks in a table
_TIMEOUT = timedelta(minutes=10)  # for all ranks to come here
_joined: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups of init_process_group()


@dataclass(frozen=True)
class TrainingMesh:
    """A DeviceMesh over all ranks of a job, and the place of this rank in it. `device_mesh()` makes it.

    `print(mesh)` shows which rank does what. `mesh["tp"]` is the DeviceMesh of one dim, for parallelize_module and
    fully_shard, and `mesh["dp", "fsdp"]` that of two.
    """

    device_mesh: DeviceMesh

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the dims, the outermost first."""
        return tuple(self.device_mesh.mesh_dim_names or ())

    def __getitem__(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        for name in (dims,) if isinstance(dims, str) else dims:
            if name not in self.dims:
                remedy = f"give device_mesh() a size for it, such as {name}=1" if name in _DIMS else "take one of them"
                raise InputError(
                    f"this mesh has the dims {listed(self.dims)}, and no {name!r}.{did_you_mean(name, self.dims)} "
                    f"{remedy[0].upper()}{remedy[1:]}"
                )
        return self.device_mesh[dims]

    def size(self, dim: str) -> int:
        """Return the number of ranks along a dim; 1 for one that the mesh does not have."""
        return self[dim].size() if dim in self.dims or dim not in _DIMS else 1

    def rank(self, dim: str) -> int:
        """Return the place of this rank along a dim; 0 for one that the mesh does not have."""
        return self[dim].get_local_rank() if dim in self.dims or dim not in _DIMS else 0

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline: the `group` of its stages."""
        return self["pp"].get_group()

    @property
    def data_rank(self) -> int:
        """The part of the batch that this rank's pipeline takes, of `data_size`.

        It is the `rank` of a DistributedSampler, whose `num_replicas` is `data_size`.
        """
        return self.rank("dp") * self.size("fsdp") + self.rank("fsdp")

    @property
    def data_size(self) -> int:
        """The number of pipelines that take different parts of the batch."""
        return self.size("dp") * self.size("fsdp")

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        kind = self.device_mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    def stages(self, schedule: str = "1F1B", num_stages: int | None = None) -> tuple[int, ...]:
        """Return the stages that a schedule puts on this rank, by its name; of `num_stages` in all.

        Without it there are as many as the schedule takes by default: one or two on each rank.
        """
        ranks = self.size("pp")
        if num_stages is not None and (num_stages < 1 or num_stages % ranks):
            raise InputError(
                f"{counted(num_stages, 'stage')} cannot be spread over {counted(ranks, 'rank')} evenly: cut the model "
                f"into a multiple of {ranks} stages, or change pp="
            )
        chunks = None if num_stages is None else num_stages // ranks
        plan = plan_for(schedule, ranks=ranks, chunks=chunks, microbatches=2 * ranks)
        return tuple(plan.placement.stages_of[self.rank("pp")])

    @cached_property
    def _rows(self) -> list[tuple[int, tuple[int, ...]]]:
        """Each rank with its coordinates, in the order of ranks."""
        ranks = self.device_mesh.mesh
        return sorted((int(ranks[tuple(place)]), tuple(map(int, place))) for place in torch.ones_like(ranks).nonzero())

    def __repr__(self) -> str:
        place = ", ".join(f"{name} {self.rank(name)} of {self.size(name)}" for name in self.dims)
        return f"{type(self).__name__}(rank {self.device_mesh.get_rank()}: {place}, on {self.device_mesh.device_type})"

    def __str__(self) -> str:
        """Return a table with a line for each rank."""
        here = self.device_mesh.get_rank()
        lines = [f"{counted(len(self._rows), 'rank')} on {self.device_mesh.device_type}"]
        lines += [f"  {name}={self.size(name)}: {_DIMS[name]}" for name in self.dims]
        width = max(4, *(len(name) + 1 for name in self.dims))
        lines.append("rank" + "".join(f"{name:>{width}}" for name in self.dims))
        for rank, place in self._rows[:_SHOWN]:
            own = "  this process" if rank == here else ""
            lines.append(f"{rank:>4}" + "".join(f"{number:>{width}}" for number in place) + own)
        more = len(self._rows) - _SHOWN
        return "\n".join([*lines, f"and {counted(more, 'rank')} more"] if more > 0 else lines)


def init_process_group(backend: str | None = None, timeout: timedelta | None = None) -> torch.device:
    """Join the ranks that torchrun has started, and return the device of this one: an accelerator's, or the CPU.

    It is `torch.distributed.init_process_group()`, but for a job that `torchrun --max-restarts` has started again: the
    store that its ranks meet in still has addresses of processes that are gone, at which torch would wait, or fail. So
    each attempt has keys of its own. Call it before `TrainingArguments` or an `Accelerator`, which join otherwise.
    torchrun does not count restarts because nodes came or went: give it one number of nodes, not `--nnodes=1:4`.

    A rank waits for others to join as long as `timeout`, and in collectives too; by default as long as torch does.

    ```python
    device = pipecut.init_process_group()
    mesh = pipecut.device_mesh(pp=2)
    ```
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"this process is not one of several ranks: {listed(missing)} {'is' if len(missing) == 1 else 'are'} not "
            f"set. Start it by `torchrun --nproc-per-node=2 {sys.argv[0] or 'script.py'}`"
        )
    if dist.is_initialized():
        raise InputError(
            "torch.distributed is initialized already: call pipecut.init_process_group() in its place, before "
            "TrainingArguments or an Accelerator is made"
        )
    accelerator, device = torch.accelerator.current_accelerator(check_available=True), torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    patience: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, ranks = next(rendezvous("env://", **patience))
    if timeout is not None:
        store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)
    if dist.group.WORLD is not None:
        _joined.add(dist.group.WORLD)
    return device


def warn_of_restarts() -> None:
    """Warn if torchrun is to start this job again when a rank ends, and its ranks could not join then."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and dist.is_initialized() and dist.group.WORLD not in _joined:
        warn(
            f"torchrun --max-restarts={restarts} starts this job again when a rank ends, and torch's own "
            "init_process_group() then waits for processes that are gone: call pipecut.init_process_group() first, "
            "before TrainingArguments or an Accelerator is made"
        )


def device_mesh(
    pp: int,
    dp: int | None = None,
    fsdp: int | None = None,
    tp: int | None = None,
    *,
    order: Sequence[str] = tuple(_DIMS),
    device_type: str | None = None,
    **others: int,
) -> TrainingMesh:
    """Make the mesh of a job of pipelines: `pp` ranks in each, and others that hold copies or parts of the same stages.

    - `pp`: ranks of a pipeline, each with its stages.
    - `dp`: pipelines with a copy of all stages each, under DistributedDataParallel or `replicate`.
    - `fsdp`: pipelines with shards of all stages, under `fully_shard`. With `dp` beside it, `fully_shard` takes
      `mesh["dp", "fsdp"]`.
    - `tp`: ranks that divide the layers of a stage, by `parallelize_module`.

    A size of -1 takes the ranks that are left. Dims that are not given are not in the mesh. All ranks call this with
    the same numbers, after `init_process_group()`.

    In the `order` of dims the last one has neighbouring ranks, and the first those that are furthest apart. By default
    `tp` is last, which waits for the link in every layer, and `pp` first, which sends activations beside the
    computation. `device_type` is by default that of the accelerator for which the process group has a backend.

    >>> import os
    >>> os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    >>> dist.init_process_group("gloo", rank=0, world_size=1)
    >>> mesh = device_mesh(pp=1, dp=-1)
    >>> mesh
    TrainingMesh(rank 0: pp 0 of 1, dp 0 of 1, on cpu)
    >>> mesh.stages("Interleaved1F1B", num_stages=2), mesh.data_rank, mesh.data_size
    ((0, 1), 0, 1)
    >>> dist.destroy_process_group()
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "device_mesh() needs a process group: call torch.distributed.init_process_group() before, in processes "
            "that torchrun or pipecut.launch() has started"
        )
    given = {"pp": pp, "dp": dp, "fsdp": fsdp, "tp": tp, **others}
    given = {name: size for name, size in given.items() if size is not None}
    kind = device_type or _device_type()
    _check_same_everywhere(given, order, kind)  # before all checks, so that what is wrong raises everywhere
    sizes = {name: _checked_size(name, size) for name, size in given.items()}
    _check_order(order, sizes)
    sizes = _fitted({name: sizes[name] for name in order if name in sizes}, dist.get_world_size())
    forget_meshes()  # those of a process group before this one
    return TrainingMesh(init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def _checked_size(name: str, size: object) -> int:
    if name not in _DIMS:
        raise InputError(
            f"device_mesh() knows no {name!r}.{did_you_mean(name, _DIMS)} The dims are {listed(_DIMS)}; for others "
            "make a DeviceMesh by init_device_mesh(), and give stages and wrappers the groups of its dims"
        )
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != _REST):
        raise InputError(f"{name}={size!r} is no number of ranks: give 1 or more, or -1 for those that are left")
    return size


def _check_order(order: Sequence[str], sizes: Mapping[str, int]) -> None:
    missing = [name for name in sizes if name not in order]
    if isinstance(order, str) or missing or len(set(order)) != len(order):
        raise InputError(
            f"order={order!r} has to name each dim once, the one with neighbouring ranks last: the dims are "
            f"{listed(sizes)}"
        )


def _fitted(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Return the sizes with the one that is -1 filled in; their product is the number of ranks."""
    open_dims = [name for name, size in sizes.items() if size == _REST]
    known = math.prod(size for size in sizes.values() if size != _REST)
    text = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if len(open_dims) > 1:
        raise InputError(f"device_mesh({text.replace(' x ', ', ')}): only one size can be -1, give the others")
    if open_dims and world % known == 0:
        return {name: world // known if size == _REST else size for name, size in sizes.items()}
    if open_dims:
        raise InputError(
            f"{world} ranks cannot be divided by {known}, which {text} needs: start a multiple of {known} processes, "
            "or change the sizes"
        )
    if known != world:
        raise InputError(
            f"{text} is {counted(known, 'rank')}, and the process group has {world}: change the sizes (one of them "
            f"may be -1, for the ranks that are left), or start {counted(known, 'process')}: torchrun "
            f"--nproc-per-node {known}"
        )
    return sizes


def _device_type() -> str:
    """Return the type of accelerator for which the process group has a backend; otherwise that is the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return accelerator.type if accelerator is not None and accelerator.type in kinds else "cpu"


def _check_same_everywhere(sizes: Mapping[str, object], order: object, device_type: str) -> None:
    """Raise on all ranks if they ask for different meshes: they would wait for each other in making the groups."""
    text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    facts = {"sizes": text, "order": str(order), "device_type": device_type}
    lines = differences(exchange(facts, None, _TIMEOUT))
    if lines:
        raise DisagreementError(
            f"the ranks ask for different meshes: {'; '.join(lines)}. Call device_mesh() alike on all of them"
        )
