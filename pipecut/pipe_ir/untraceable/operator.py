"""The operator that stands in a trace for the call of a module that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

torch.library.define(
    "pipecut::eager_call",
    "(Tensor[] inputs, Tensor[] state, Tensor(a!)[] written, str label) -> Tensor[]",
)

EAGER_CALL: Callable[..., list[torch.Tensor]] = torch.ops.pipecut.eager_call.default


@dataclass(frozen=True)
class NewTensor:
    """A tensor that a call is to return; a size of None depends on the data.

    `order` are its dims as they lie in memory.
    """

    shape: tuple[Any, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_TO_MAKE: list[Sequence[NewTensor]] = []


@torch.library.register_fake("pipecut::eager_call")  # type: ignore[untyped-decorator]
def _stand_ins(*_: Any) -> list[torch.Tensor]:
    new_size = torch.library.get_ctx().new_dynamic_size
    return [_empty(new, [new_size() if size is None else size for size in new.shape]) for new in _TO_MAKE[-1]]


def _empty(new: NewTensor, shape: list[Any]) -> torch.Tensor:
    lying = torch.empty([shape[dim] for dim in new.order], dtype=new.dtype, device=new.device)
    return lying.permute([new.order.index(dim) for dim in range(len(shape))])


def record_call(
    inputs: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    label: str,
    results: Sequence[NewTensor],
) -> list[torch.Tensor]:
    """Put one step into the trace that goes on; its results are tensors of the tracer."""
    _TO_MAKE.append(results)
    try:
        return list(EAGER_CALL(list(inputs), list(state), list(written), label))
    finally:
        _TO_MAKE.pop()
