"""torch.distributed.pipelining._debug: tensors as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..torch_internals import pytree
from .imported_names import imported_by


def friendly_debug_info(v: object) -> str:
    """Describe a tensor by its shape and dtype, any other value by its text.

    >>> import torch
    >>> friendly_debug_info(torch.ones(2))
    'Tensor(torch.Size([2]), grad=False, dtype=torch.float32)'
    """
    if isinstance(v, Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return str(v)


def map_debug_info(a: Any) -> Any:
    """Describe all values in a nested one."""
    return pytree.tree_map(friendly_debug_info, a)


if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = imported_by(__name__)
