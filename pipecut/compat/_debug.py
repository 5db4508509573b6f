"""torch.distributed.pipelining._debug: tensors in words."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def friendly_debug_info(v: object) -> str:
    """A tensor by what it is, and anything else by itself.

    >>> import torch
    >>> friendly_debug_info(torch.ones(2))
    'Tensor(torch.Size([2]), grad=False, dtype=torch.float32)'
    """
    if isinstance(v, Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return str(v)


def map_debug_info(a: Any) -> Any:
    """The same for all values in a nested one."""
    return tree_map(friendly_debug_info, a)
