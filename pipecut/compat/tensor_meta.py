"""Metadata of tensors and stages as upstream's classes hold it, for code that reads or makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import StageMetadataError
from ..stage import is_distributed
from ..text import shape_text
from ..torch_internals import mesh_layout

MeshKey: TypeAlias = tuple[Any, Any]
Strides: TypeAlias = tuple[int, ...]


PipeliningMetadataError = StageMetadataError


@dataclass(frozen=True)
class _TensorMeta:
    """Shape, layout and dtype of a tensor."""

    shape: torch.Size
    stride: Strides
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: Tensor) -> _TensorMeta:
        if is_distributed(tensor):
            raise PipeliningMetadataError(
                f"Expected plain tensor, got DTensor (of shape {shape_text(tensor.shape)}): use "
                "_DTensorMeta.from_dtensor(), or extract_tensor_meta() for either"
            )
        return _TensorMeta(tensor.shape, tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> Tensor:
        """Make a tensor like that, with undefined values."""
        return self.memory(device).requires_grad_(self._has_gradient())

    def memory(self, device: torch.device | str) -> Tensor:
        """Make the same without a gradient; of a DTensor, the shard."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def _has_gradient(self) -> bool:
        # Integers have none, whatever is said of them.
        return self.requires_grad and (self.dtype.is_floating_point or self.dtype.is_complex)

    def as_gradient(self) -> _TensorMeta | None:
        """Return the metadata of its gradient; None if it has none."""
        return dataclasses.replace(self, requires_grad=False) if self.requires_grad else None

    def get_diff(self, other: object) -> list[str]:
        """Return the differences to another one; `requires_grad` does not count."""
        if not isinstance(other, _TensorMeta):
            return [f"type: expected {type(self).__name__}, got {type(other).__name__}"]
        return self._differences(other, ("shape", "stride", "dtype"))

    def _differences(self, other: _TensorMeta, names: Iterable[str]) -> list[str]:
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} mismatch: {mine} vs {its}" for name, mine, its in pairs if mine != its]


@dataclass(frozen=True)
class _DTensorMeta(_TensorMeta):
    """Shape, layout and dtype of a DTensor: of this rank's shard, and of the whole."""

    global_shape: torch.Size = dataclasses.field(default_factory=torch.Size)
    global_stride: Strides = ()
    placements: tuple[Any, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_layout: Any = None

    @staticmethod
    def from_dtensor(dtensor: Any) -> _DTensorMeta:
        local, mesh = dtensor.to_local(), dtensor.device_mesh
        return _DTensorMeta(
            local.shape,
            tuple(local.stride()),
            dtensor.dtype,
            dtensor.requires_grad,
            dtensor.shape,
            tuple(dtensor.stride()),
            tuple(dtensor.placements),
            tuple(mesh.mesh_dim_names or ()),
            mesh_layout(mesh),
        )

    @property
    def mesh_cache_key(self) -> MeshKey:
        """The key by which a mesh is found."""
        return (self.mesh_dim_names, self.mesh_layout)

    def to_dtensor(self, device: torch.device | str, mesh: Any) -> Any:
        """Make a DTensor like that, with undefined values."""
        from torch.distributed.tensor import DTensor

        local, shape, stride = self.memory(device), self.global_shape, self.global_stride
        made = DTensor.from_local(local, mesh, self.placements, shape=shape, stride=stride, run_check=False)
        return made.requires_grad_(self._has_gradient())

    def as_gradient(self) -> None:
        """Return None: a gradient may be placed in another way."""

    def get_diff(self, other: object) -> list[str]:
        found = super().get_diff(other)
        if not isinstance(other, _DTensorMeta):
            return [*found, "type: _DTensorMeta vs _TensorMeta"] if isinstance(other, _TensorMeta) else found
        names = ("global_shape", "global_stride", "placements", "mesh_dim_names", "mesh_layout")
        return found + self._differences(other, names)


TensorMeta: TypeAlias = _TensorMeta
GetMeshCallback: TypeAlias = Callable[..., Any]
Metas: TypeAlias = tuple["_TensorMeta | None", ...]


@dataclass
class _StageMeta:
    """Metadata of the tensors of a stage."""

    inputs: Metas | None = None
    outputs: Metas | None = None
    input_grads: Metas | None = None
    output_grads: Metas | None = None

    def has_any(self) -> bool:
        return any(metas is not None for metas in (self.inputs, self.outputs, self.input_grads, self.output_grads))

    def has_dtensors(self) -> bool:
        """Return True if an input or an output is a DTensor."""
        return any(isinstance(meta, _DTensorMeta) for metas in (self.inputs, self.outputs) for meta in metas or ())

    def is_complete_for_forward(self) -> bool:
        return self.inputs is not None and self.outputs is not None


@dataclass(frozen=True)
class _StageForwardMeta:
    forward_metas: Metas


@dataclass(frozen=True)
class _StageBackwardMeta:
    backward_metas: Metas


class InferenceMode(Enum):
    """Source of a stage's metadata: given, or found in the first step."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def needs_dynamic(cls, meta: _StageMeta, stage_has_backward: bool) -> bool:
        """Return True if metadata is missing: the gradients of DTensors do not follow from the values."""
        without_gradients = meta.input_grads is None or meta.output_grads is None
        unknown_gradients = stage_has_backward and meta.has_dtensors() and without_gradients
        return unknown_gradients or not meta.is_complete_for_forward()


class _MeshCache:
    """Device meshes by the names of their dims and their layout."""

    def __init__(self, get_mesh_cb: GetMeshCallback | None = None) -> None:
        self._get_mesh = get_mesh_cb
        self._meshes: dict[MeshKey, Any] = {}

    def __contains__(self, key: MeshKey) -> bool:
        return key in self._meshes

    def __len__(self) -> int:
        return len(self._meshes)

    def put(self, key: MeshKey, mesh: Any) -> None:
        self._meshes[key] = mesh

    def get_mesh(self, key: MeshKey) -> Any:
        if key not in self._meshes:
            if self._get_mesh is None:
                raise PipeliningMetadataError(
                    f"no mesh with dims {key[0]} and layout {key[1]} is known: pass get_mesh= to the stage, a function "
                    "of the two that returns it"
                )
            mesh = self._get_mesh(*key)
            if mesh is None:
                raise PipeliningMetadataError(
                    f"the get_mesh= callback returned None for the dims {key[0]} and the layout {key[1]}: it must "
                    "return their mesh"
                )
            self._meshes[key] = mesh
        return self._meshes[key]

    def update_from_tensors(self, tensors: tuple[Tensor | None, ...]) -> None:
        for tensor in tensors:
            if is_distributed(tensor):
                self.put(_DTensorMeta.from_dtensor(tensor).mesh_cache_key, tensor.device_mesh)
