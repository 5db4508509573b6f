"""DTensors between stages: a layout that can be sent, the local part, and the DTensor made of both again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import StageMetadataError
from ..text import dtype_name, shape_text
from ..torch_internals import mesh_layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_distributed(value: Any) -> TypeIs[DTensor]:
    """Return True for a DTensor, without importing its module: while it is not imported, there is no DTensor."""
    if type(value) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class MeshKey(NamedTuple):
    """Key of a mesh among those of a rank; the same on all stages, whose meshes are of other ranks."""

    dim_names: tuple[str, ...]
    layout: Any  # torch's own description: sizes, and the distances between ranks
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshKey:
        """Return the key of a mesh."""
        sizes = tuple(mesh.shape)
        return cls(tuple(mesh.mesh_dim_names or ()), mesh_layout(mesh, sizes), sizes)

    def __str__(self) -> str:
        names = self.dim_names or ("",) * len(self.sizes)
        pairs = zip(names, self.sizes, strict=True)
        return f"mesh ({', '.join(f'{name}={size}' if name else str(size) for name, size in pairs)})"


class MeshLayout(NamedTuple):
    """Layout of a DTensor: the shape and strides of the whole, its placements, and the key of its mesh."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh: MeshKey

    @classmethod
    def of(cls, tensor: Tensor) -> MeshLayout | None:
        """Return the layout of a tensor; None for a plain one."""
        if type(tensor) is Tensor or not is_distributed(tensor):
            return None
        key = MeshKey.of(tensor.device_mesh)
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tuple(tensor.placements), key)

    def whole(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the DTensor of which this rank has a local part."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.placements))}) on the {self.mesh}"


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, without its graph; a plain tensor as it is."""
    if type(tensor) is Tensor or not is_distributed(tensor):
        return tensor
    detached: Any = tensor.detach()  # which waits for a collective that is still under way
    local: Tensor = detached.to_local()
    return local


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor into a plain tensor; return a plain one as it is."""
    return tensor if type(tensor) is Tensor or not is_distributed(tensor) else tensor.full_tensor()


def place_like(on_mesh: MeshLayout, tensor: Any) -> Tensor:
    """Redistribute a DTensor on its mesh to the placements of a layout.

    torch makes no partial sum of what is not one: there the first rank of the dim holds all of it, and the others
    hold zeros.
    """
    from torch.distributed.tensor import Replicate

    wanted = on_mesh.placements
    pairs = list(zip(tensor.placements, wanted, strict=True))
    new = [dim for dim, (is_, wants) in enumerate(pairs) if wants.is_partial() and is_ != wants]
    step = [Replicate() if dim in new else wants for dim, wants in enumerate(wanted)]
    if tuple(tensor.placements) != tuple(step):
        tensor = tensor.redistribute(placements=step)
    if not new:
        return tensor  # type: ignore[no-any-return]
    local, mesh = local_part(tensor), tensor.device_mesh
    holds_it = all(mesh.get_local_rank(dim) == 0 for dim in new)
    return on_mesh.whole(local if holds_it else torch.zeros_like(local), mesh)


def ready_to_send(tensor: Tensor) -> Tensor:
    """Return a tensor in a form that can be sent: contiguous, with conjugation and negation carried out."""
    if type(tensor) is not Tensor and is_distributed(tensor):
        # Not contiguous() of the DTensor itself, which would sum up one that is Partial.
        local = local_part(tensor)
        ready = ready_to_send(local)
        if ready is local:
            return tensor
        stride = torch.empty(tensor.shape, device="meta").stride()
        placed = MeshLayout(
            tuple(tensor.shape), tuple(stride), tuple(tensor.placements), MeshKey.of(tensor.device_mesh)
        )
        return placed.whole(ready, tensor.device_mesh).requires_grad_(tensor.requires_grad)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def placement_of(on_mesh: MeshLayout | None) -> tuple[Any, ...] | None:
    """Return the placements and the mesh of a layout, without its sizes; None for a plain tensor."""
    return None if on_mesh is None else (on_mesh.placements, on_mesh.mesh)


def describe_tensor(tensor: Tensor) -> str:
    """Describe a tensor by dtype, shape and layout.

    >>> describe_tensor(torch.ones(2, 3))
    'float32[2, 3]'
    """
    return describe(tuple(tensor.shape), tensor.dtype, MeshLayout.of(tensor))


def describe(shape: tuple[int, ...], dtype: torch.dtype, on_mesh: MeshLayout | None) -> str:
    """Describe a tensor of which these are known."""
    plain = f"{dtype_name(dtype)}{shape_text(shape)}"
    return plain if on_mesh is None else f"{plain} as {on_mesh}"


class Meshes:
    """The meshes that a stage knows, on which DTensors from other stages are placed.

    They are those of its example tensors, of its outputs, of its module's state, and what `get_mesh` returns.
    """

    def __init__(self, stage_index: int, get_mesh: Callable[..., Any] | None) -> None:
        self.stage_index = stage_index
        self.get_mesh = get_mesh
        self._known: dict[MeshKey, DeviceMesh] = {}

    def add_from(self, values: Iterable[Any]) -> None:
        """Add the meshes of those values that are DTensors."""
        for value in values:
            if is_distributed(value):
                self._known.setdefault(MeshKey.of(value.device_mesh), value.device_mesh)

    def find(self, key: MeshKey, module: nn.Module) -> DeviceMesh:
        """Return the mesh of this rank for a key."""
        if key not in self._known:  # the stage's module may have been made parallel only now
            self.add_from(chain(module.parameters(), module.buffers()))
        if key not in self._known:
            self._known[key] = self._from_get_mesh(key)
        return self._known[key]

    def _from_get_mesh(self, key: MeshKey) -> DeviceMesh:
        asked = f"dim names {key.dim_names} and layout {key.layout}"
        if self.get_mesh is None:
            raise StageMetadataError(
                f"stage {self.stage_index} gets a DTensor on the {key}, {asked}, and knows no such mesh: make the "
                "stage with get_mesh=, a function of dim names and layout that returns the mesh of this rank, or with "
                "input_args or output_args on that mesh"
            )
        mesh = self.get_mesh(key.dim_names, key.layout)
        if not hasattr(mesh, "mesh_dim_names") or tuple(mesh.shape) != key.sizes:
            raise StageMetadataError(
                f"get_mesh= of stage {self.stage_index} returned {mesh!r} for {asked}: it must return a mesh of sizes "
                f"{list(key.sizes)}"
            )
        return mesh  # type: ignore[no-any-return]
