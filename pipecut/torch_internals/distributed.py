"""Parts of torch.distributed without a public name: wrappers, meshes, backends, the description of a checkpoint.

DistributedDataParallel, replicate and fully_shard average gradients after one backward. A stage has one backward per
microbatch, and averages after the last: their reducers have to be notified. The `.metadata` of
torch.distributed.checkpoint is a pickle, and unpickling may run any code; public torch reads it with `pickle.load`.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Parts of the messages of torch.distributed, gloo's and NCCL's too, when another rank has gone or does not answer: they
# come as a RuntimeError like any other.
LOST_CONNECTION = ("Connection closed", "Connection reset", "pair closure", "Broken pipe", "imed out", "imeout", "NCCL")


def abort_connections(group: dist.ProcessGroup, device: torch.device) -> None:
    """Break the connections of a group's backend for a device, so that nobody waits at them."""
    group._get_backend(device).abort()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long the backend of a group for a device waits for other ranks; public torch only sets it."""
    options: Any = group._get_backend(device).options
    return cast(timedelta, options._timeout)


def number_of_groups() -> int:
    """Return the number of process groups that this process is in; torch lists them nowhere else."""
    return len(dist.distributed_c10d._world.pg_map)


def mesh_layout(mesh: Any, default: Any = None) -> Any:
    """Return sizes and strides of a DeviceMesh over ranks, the same on all ranks; older torch has none."""
    return getattr(mesh, "_layout", default)


def forget_meshes() -> None:
    """Clear torch's cache of how operators place DTensors, whose entries hold meshes.

    A mesh that equals one of a process group that was destroyed is replaced by that one in every result: groups are
    looked up by names, which are taken again, or are gone. Public torch has nothing for it.
    """
    if "torch.distributed.tensor" in sys.modules:  # otherwise there is no DTensor
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def mark_ready(reducer: Any, number: int) -> None:
    """Tell a reducer of DistributedDataParallel that the gradient of a parameter is complete."""
    reducer._autograd_hook(number)


def averaged_parameters(module: DistributedDataParallel) -> int:
    """Return the number of parameters that DistributedDataParallel was made to average."""
    return int(module._get_ddp_logging_data()["num_parameter_tensors"])  # type: ignore[no-untyped-call]


def hook_based_options(module: DistributedDataParallel) -> dict[str, bool]:
    """Return the options with which DistributedDataParallel averages by hooks in every backward; True if set."""
    return {
        "mixed_precision": module.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(module._delay_all_reduce_params),
        "the python reducer of torch.compile": module._use_python_reducer,
    }


def static_graph_has_run(module: DistributedDataParallel) -> bool:
    """Return True if DistributedDataParallel with static_graph=True has begun its first step."""
    return bool(module._static_graph_delay_allreduce_enqueued)


def hold_static_graph(module: DistributedDataParallel) -> None:
    """Keep DistributedDataParallel with static_graph=True from averaging after its first backward."""
    module._static_graph_delay_allreduce_enqueued = True


def average_static_graph(module: DistributedDataParallel) -> None:
    """Average the gradients of a first step of DistributedDataParallel with static_graph=True."""
    reducer: Any = module.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    reducer._delay_all_reduce()


# Module and name of the class of modules that were given to `replicate()`. It is not imported before the user does.
REPLICATE_CLASS = ("torch.distributed._composable.replicate", "DDP")


class ReplicateState:
    """State that `replicate()` keeps of a module: a DistributedDataParallel over its parameters, made by lazy_init."""

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed._composable.replicate import replicate

        self._state: Any = replicate.state(module)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group over which the module is replicated."""
        if self._state.has_initialized:
            return self._state._ddp.process_group  # type: ignore[no-any-return]
        options = self._state._init_kwargs
        mesh, group = options.get("device_mesh"), options.get("process_group")
        found = mesh.get_group() if mesh is not None else group if group is not None else dist.group.WORLD
        assert isinstance(found, dist.ProcessGroup)  # torch.distributed is initialised
        return found

    @property
    def wrapper(self) -> DistributedDataParallel:
        """The DistributedDataParallel inside, made now if it is not there yet."""
        if not self._state.has_initialized:
            self._state.lazy_init()
        return self._state._ddp  # type: ignore[no-any-return]

    @property
    def averages(self) -> bool:
        """True unless the user has switched averaging off."""
        return not self._state._no_sync

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that are averaged, by their names in the module."""
        yield from zip(self._state._param_names, self._state._param_list, strict=True)

    @contextlib.contextmanager
    def without_average(self) -> Iterator[None]:
        """Run a forward after whose backward gradients are not averaged."""
        before, self._state._no_sync = self._state._no_sync, True
        try:
            yield
        finally:
            self._state._no_sync = before


def fsdp_mesh_infos(part: Any) -> list[Any]:
    """Return the meshes over which fully_shard holds the parameters of a module.

    The parameters themselves may have other meshes, over the same ranks.
    """
    state: Any = part._get_fsdp_state()
    # The latter where torch has one group of parameters per module.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group.mesh_info for group in groups if group is not None]


# Where a checkpoint of torch.distributed.checkpoint has its description, and those of a rank that saved alone.
METADATA_FILE = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Written by torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows the classes of a checkpoint's description, dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _CLASSES.get(module, ())
        if not known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's description")
        return super().find_class(module, name)


def unpickle_metadata(content: bytes) -> Any:
    """Return the description of a checkpoint without running code from it; raise pickle.UnpicklingError otherwise."""
    for opcode, argument, _ in pickletools.genops(content):
        # The unpickler makes a table as long as the largest number that an object is kept under.
        if "PUT" in opcode.name and int(argument or 0) > len(content):
            raise pickle.UnpicklingError(
                f"it keeps an object under the number {argument}, and has {len(content)} bytes"
            )
    return _MetadataUnpickler(io.BytesIO(content)).load()
