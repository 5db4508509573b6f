"""Makes models whose parameters are on the meta device and whose buffers have values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parameter import is_lazy


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Make models without memory for their parameters.

    Unlike `torch.device("meta")` it leaves buffers and other tensors as they are: tables that a constructor computes
    and no checkpoint has. One parameter at a time has memory, until its module has it. Works for all threads.

    >>> from pipecut import empty_weights
    >>> with empty_weights():
    ...     layer = nn.BatchNorm1d(4)
    >>> layer.weight.device, layer.running_var.device
    (device(type='meta'), device(type='cpu'))
    """
    register = nn.Module.register_parameter

    def register_without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not is_lazy(param) and param.device.type != "meta":
            _forget_values(param)
        register(module, name, param)

    with patch.object(nn.Module, "register_parameter", register_without_memory):
        yield


def _forget_values(parameter: nn.Parameter) -> None:
    """Move a parameter to the meta device: the very object, for another module may be about to share it."""
    empty = torch.Tensor._make_subclass(type(parameter), parameter.detach().to("meta"), parameter.requires_grad)
    vars(empty).update(vars(parameter))
    torch.utils.swap_tensors(parameter, empty)  # type: ignore[no-untyped-call]
