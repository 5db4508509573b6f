"""The meshes that a stage knows: DTensors that come from other stages are put on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from .examples import StageMetadataError
from .microbatch.distributed_tensor import is_distributed
from .on_mesh import MeshKey

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GetMesh = Callable[..., Any]


class Meshes:
    """Those of the tensors that the stage was seen with, of its module's state, and what `get_mesh` returns."""

    def __init__(self, stage_index: int, get_mesh: GetMesh | None) -> None:
        self.stage_index = stage_index
        self.get_mesh = get_mesh
        self._known: dict[MeshKey, DeviceMesh] = {}

    def see(self, values: Iterable[Any]) -> None:
        """Note the meshes of those values that are DTensors."""
        for value in values:
            if is_distributed(value):
                self._known.setdefault(MeshKey.of(value.device_mesh), value.device_mesh)

    def find(self, key: MeshKey, module: nn.Module) -> DeviceMesh:
        """The mesh of this rank that the key stands for."""
        if key not in self._known:  # the stage's module may have been made parallel only now
            self.see(chain(module.parameters(), module.buffers()))
        if key not in self._known:
            self._known[key] = self._asked_for(key)
        return self._known[key]

    def _asked_for(self, key: MeshKey) -> DeviceMesh:
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
