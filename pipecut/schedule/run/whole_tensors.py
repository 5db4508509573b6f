"""Parcels with DTensors: their local parts are received, and the whole is made of them when they are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...stage.on_mesh import OnMesh
from ...stage.stage import PipelineStage
from .transport import Arrival, Meta

Joint = tuple[int, OnMesh, Any]  # the place in a parcel, how the DTensor lies there, its mesh


def joints_of(metas: Sequence[Meta], stage: PipelineStage) -> list[Joint]:
    """The DTensors in a parcel for a stage. A mesh that the stage does not know is an error."""
    return [
        (place, meta.on_mesh, stage.mesh_for(meta.on_mesh.mesh))
        for place, meta in enumerate(metas)
        if meta.on_mesh is not None
    ]


class WholeTensors:
    """A parcel of local parts that arrives as the DTensors that they are parts of; the rest of it as it is."""

    def __init__(self, arrival: Arrival, joints: Sequence[Joint]) -> None:
        self._arrival = arrival
        self._joints = joints

    def wait(self) -> list[Tensor]:
        tensors = list(self._arrival.wait())
        for place, on_mesh, mesh in self._joints:
            tensors[place] = on_mesh.whole(tensors[place], mesh)
        return tensors
