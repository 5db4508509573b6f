"""The gradient scaler of torch, with its check for infinities open to a subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FoundInf = dict[torch.device, Tensor]  # above 0 where a gradient is not finite


class OpenGradScaler(torch.amp.GradScaler):
    """GradScaler that lets `found_by(check)` run its check, and return what was found instead.

    There is no public way to say that another process has found an infinity. Both `unscale_` and the step of a fused
    optimizer, which scales by itself, make the check in one method.
    """

    def found_by(self, check: Callable[[], FoundInf]) -> FoundInf:
        """Run the check, which also divides the gradients by the scale."""
        return check()

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> FoundInf:
        base = super()._unscale_grads_
        return self.found_by(lambda: base(optimizer, inv_scale, found_inf, allow_fp16))
