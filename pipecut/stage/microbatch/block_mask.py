"""BlockMasks of flex attention, cut along their batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import TypeIs

_MaskMod = Callable[[Any, Any, Any, Any], Any]


def is_block_mask(value: Any) -> TypeIs[BlockMask]:
    """Whether a value is a BlockMask. Their module is slow to import; while it is not there, there is no BlockMask."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def batch_of(mask: BlockMask) -> int:
    """The number of samples that a mask tells apart; 1 where it is the same for all of them."""
    return mask.kv_indices.shape[0] if mask.kv_indices.dim() == 4 else 1


def cut_block_mask(mask: BlockMask, ranges: Sequence[tuple[int, int]]) -> list[BlockMask]:
    """Masks of ranges (start, size) of samples; `mask_mod` sees a sample under its number in the whole batch.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> lengths = torch.tensor([2, 3, 4])
    >>> mask = create_block_mask(lambda b, h, q, k: k < lengths[b], B=3, H=None, Q_LEN=4, KV_LEN=4, device="cpu")
    >>> first, second = cut_block_mask(mask, [(0, 2), (2, 1)])
    >>> first.shape, second.shape
    ((2, 1, 4, 4), (1, 1, 4, 4))
    >>> [bool(second.mask_mod(torch.tensor(0), 0, 0, key)) for key in range(5)]
    [True, True, True, True, False]
    """
    return [_rows(mask, start, size) for start, size in ranges]


def _rows(mask: BlockMask, start: int, size: int) -> BlockMask:
    # Which tensors a BlockMask has depends on the release of torch; all have the batch in front, or a 1 there.
    part = copy.copy(mask)
    batch = batch_of(mask)
    for name, value in vars(mask).items():
        if isinstance(value, torch.Tensor) and value.shape[0] == batch:
            setattr(part, name, value.narrow(0, start, size))
    part.mask_mod = _shifted(mask.mask_mod, start, mask.kv_indices.device)
    return part


def _shifted(mask_mod: _MaskMod, start: int, device: torch.device) -> _MaskMod:
    # A tensor, not a number: code compiled for one microbatch then serves the others too.
    offset = torch.tensor(start, dtype=torch.int32, device=device)

    def of_the_whole_batch(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_mod(sample + offset, head, query, key)

    return of_the_whole_batch
