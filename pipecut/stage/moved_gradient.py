"""A gradient that is a DTensor, brought to where the first one of its kind lay: whoever receives it counts on that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import PipeError
from .on_mesh import MeshKey, OnMesh, in_order

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def moved_to(tensor: DTensor, wanted: OnMesh) -> Tensor:
    """The same values, lying as wanted.

    Also if that is Partial, where torch does not go by itself: one rank has the values then, and the others zeros.
    """
    from torch.distributed.tensor import Replicate

    pairs = list(zip(tensor.placements, wanted.placements, strict=True))
    to_sum = [dim for dim, (has, wants) in enumerate(pairs) if wants.is_partial() and has != wants]
    mesh, can_sum = tensor.device_mesh, all(wanted.placements[dim].is_partial("sum") for dim in to_sum)
    if MeshKey.of(mesh) != wanted.mesh or not can_sum:
        raise PipeError(
            f"a gradient is {OnMesh.of(tensor)} in this microbatch, and was {wanted} in the first one of these shapes, "
            "where it cannot be brought: redistribute() the input where the stage begins, so that its gradients lie "
            "alike"
        )
    if all(has == wants for has, wants in pairs):
        return tensor
    placements = [Replicate() if dim in to_sum else wants for dim, wants in enumerate(wanted.placements)]
    local = tensor.redistribute(placements=placements).to_local()
    if any(mesh.get_local_rank(dim) for dim in to_sum):
        local = torch.zeros_like(local)
    return wanted.whole(in_order(local), mesh)
