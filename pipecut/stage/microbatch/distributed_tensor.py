"""DTensors cut and put together: mesh and placements stay, and a row is the row of the global tensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_distributed(value: Any) -> TypeIs[DTensor]:
    """Whether a value is a DTensor. Their module is slow to import; while it is not there, there is no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def cut_distributed(tensor: DTensor, dim: int, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Views of ranges (start, size) of rows, placed as the tensor is.

    If `dim` is itself sharded, the rows of a microbatch are not on the ranks that must hold them: the tensor is
    gathered along that dim once, and each chunk sharded anew.
    """
    from torch.distributed.tensor import Replicate

    placements = tensor.placements
    whole = tensor
    if any(placement.is_shard(dim) for placement in placements):
        gathered = [Replicate() if placement.is_shard(dim) else placement for placement in placements]
        whole = tensor.redistribute(placements=gathered)
    return [_placed(whole.narrow(dim, start, size), placements) for start, size in ranges]


def join_distributed(chunks: Sequence[DTensor], dim: int) -> torch.Tensor:
    """Chunks that are placed alike, one after the other, placed as they are."""
    return _placed(torch.cat(list(chunks), dim), chunks[0].placements)


def _placed(tensor: Any, placements: Any) -> torch.Tensor:
    made: torch.Tensor = tensor if tensor.placements == placements else tensor.redistribute(placements=placements)
    return made
