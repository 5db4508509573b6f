"""Norms of gradients that are DTensors, as under fully_shard and tensor parallelism: those of the whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..run import Agreement
from ..stage import local_part
from ..torch_internals import norm_of_each

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def sharded_norms(
    grads: Sequence[DTensor], norm_type: float, foreach: bool | None, agreement: Agreement
) -> list[Tensor]:
    """Return the norm of each gradient, in one collective for all that are sharded over the same ranks.

    The ranks that hold shards of a stage call this at the same time, with the same gradients in the same order.
    """
    summed = [_without_partial_sums(grad) for grad in grads]
    locals_ = [local_part(grad) for grad in summed]
    full = [place for place, local in enumerate(locals_) if local.numel()]
    norms = [torch.full((), _neutral(norm_type), dtype=_real(each.dtype), device=each.device) for each in locals_]
    made = norm_of_each([locals_[place] for place in full], norm_type, foreach)
    for place, norm in zip(full, made, strict=True):
        norms[place] = norm
    shared: dict[Any, list[int]] = {}
    for place, grad in enumerate(summed):
        dims = tuple(dim for dim, each in enumerate(grad.placements) if not each.is_replicate())
        shared.setdefault((grad.device_mesh, dims), []).append(place)
    for (mesh, dims), places in shared.items():
        if not dims:
            continue
        powers = _powers(torch.stack([norms[place].double() for place in places]), norm_type)
        for dim in dims:
            agreement.reduce(powers, mesh.get_group(dim), _operation(norm_type))
        for place, whole in zip(places, _roots(powers, norm_type).unbind(), strict=True):
            norms[place] = whole.to(norms[place].dtype)
    return norms


def _without_partial_sums(grad: DTensor) -> DTensor:
    """Return a gradient of which every rank has its shard, or all of it, and not a part of a sum."""
    from torch.distributed.tensor import Replicate

    if not any(placement.is_partial() for placement in grad.placements):
        return grad
    return grad.redistribute(placements=[Replicate() if each.is_partial() else each for each in grad.placements])


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _neutral(norm_type: float) -> float:
    """Return the norm of a shard without elements."""
    return math.inf if norm_type == -math.inf else 0.0


def _operation(norm_type: float) -> dist.ReduceOp.RedOpType:
    return {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}.get(norm_type, dist.ReduceOp.SUM)


def _powers(norms: Tensor, norm_type: float) -> Tensor:
    return norms if math.isinf(norm_type) or norm_type == 0 else norms.pow(norm_type)


def _roots(powers: Tensor, norm_type: float) -> Tensor:
    return powers if math.isinf(norm_type) or norm_type == 0 else powers.pow(1 / norm_type)
