"""A module that writes to its inputs in place, as nn.ReLU(inplace=True) does at the beginning of a stage."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..pipe_ir.structure import map_leaves

# What autograd says of a write to a tensor at which its graph begins, or to a view of one.
_REFUSED = "leaf Variable that requires grad is being used in an in-place operation"


class WrittenInputs:
    """Calls a module, on copies of its inputs once it was seen to write to them.

    The inputs of a stage are leaves, for their gradients are sent back, and autograd forbids writing to a leaf.
    """

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self.seen = False

    def call(self, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns."""
        if not self.seen:
            try:
                return module(*inputs, **kwargs)
            except RuntimeError as error:
                if _REFUSED not in str(error):
                    raise
        copies, named = map_leaves(_copied, (tuple(inputs), dict(kwargs)))
        result = module(*copies, **named)
        if not self.seen:
            self.seen = True
            warnings.warn(
                f"the module of stage {self.stage_index} writes to its inputs in place, and gets copies of them from "
                "now on. That costs memory: inplace=False where the stage begins, or a cut one operation later, "
                "saves it",
                stacklevel=2,
            )
        return result


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad and value.is_leaf else value
