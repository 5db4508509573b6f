"""Calls that torch passes over when there is nothing to do, noted in every trace all the same.

`x.contiguous()` of a tensor that is contiguous leaves nothing in a trace. In another mode or size it may not be, and
the two traces of one code would not match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class NotedCalls(TorchFunctionMode):
    """Sends `contiguous()` through the dispatcher, where tracers are.

    >>> x = torch.ones(2)
    >>> with NotedCalls():
    ...     x.contiguous() is not None
    True
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.contiguous:
            # Of an alias: where there is nothing to do the result is the argument itself, and a tracer would from then
            # on take the argument for something that this call has made.
            alias = torch.ops.aten.alias.default(args[0])
            return torch.ops.aten.contiguous.default(alias, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
